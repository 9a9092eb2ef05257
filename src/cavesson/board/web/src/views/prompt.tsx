/** The prompts of a run, or the one in the address. */

import { PromptList } from "../parts/prompt-list";
import { PromptPage } from "../parts/prompt-page";
import { useRoute } from "../state/router";

export function PromptView() {
  const { query } = useRoute();
  const id = query["prompt"];
  return id === undefined ? <PromptList /> : <PromptPage key={id} id={id} />;
}
