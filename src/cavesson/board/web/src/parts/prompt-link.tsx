/** A link to the page of a prompt. */

import type { ComponentChildren } from "preact";
import { type Route, useRoute } from "../state/router";
import { showing, type Split, splitOf } from "../state/selection";
import { Link } from "./link";

interface Props {
  run: string;
  /** absent in pages that were saved by earlier versions */
  id: string | null | undefined;
  /** the split of its responses, if it is not the one in view */
  split?: Split;
  class?: string;
  children: ComponentChildren;
}

export function promptRoute(run: string, id: string, split: Split): Route {
  return { view: "prompt", query: { run, prompt: id, ...showing(split) } };
}

export function PromptLink({ run, id, split, class: kind, children }: Props) {
  const here = splitOf(useRoute().query);
  if (!id) return <>{children}</>;
  return (
    <Link to={promptRoute(run, id, split ?? here)} {...(kind ? { class: kind } : {})}>
      {children}
    </Link>
  );
}
