/** Asks in advance for what a view needs. */

import { render } from "preact";
import { inAdvance } from "./api/client";
import { Ahead, type Route } from "./state/router";
import { PAGES } from "./views/pages";

/** Draws a view where nobody sees it, so that it asks for its answers, and throws it away. */
export function lookAhead(to: Route): void {
  const Page = PAGES[to.view];
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
