/** Asks in advance for what a view needs. */

import { type JSX, render } from "preact";
import { inAdvance } from "./api/client";
import { Ahead, type Route } from "./state/router";

/** Draws a view where nobody sees it, so that it asks for its answers, and throws it away. */
export function lookAhead(Page: () => JSX.Element, to: Route): void {
  const nowhere = document.createElement("div");
  inAdvance(() =>
    render(
      <Ahead.Provider value={to}>
        <Page />
      </Ahead.Provider>,
      nowhere,
    ),
  );
  render(null, nowhere);
}
