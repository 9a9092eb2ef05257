/** Two responses to a prompt beside each other, and what differs between their texts. */

import { useResource } from "../api/resource";
import { rolloutAddress } from "../api/tokens";
import type { PromptPage, Rollout, RolloutKey } from "../api/types";
import { useText } from "../i18n";
import { number } from "../maths/format";
import { ENDS, type End, isEnd, placeText, type PromptSide, SIDES, sideOf } from "../maths/sides-of-prompt";
import { tokensRoute } from "../state/board";
import { patchRoute, useRoute } from "../state/router";
import { Card } from "./card";
import { Conversation, turnsOf } from "./conversation";
import { Problem } from "./failure";
import { Link } from "./link";
import { Segments } from "./segments";
import { CutText, TextDifference } from "./text";

export function TwoResponses({ run, prompt }: { run: string; prompt: PromptPage }) {
  const t = useText();
  const { query } = useRoute();
  const [a, b] = SIDES.map((side) => sideOf(prompt, side, query[side]));
  const [first, second] = [useRollout(run, a), useRollout(run, b)];
  return (
    <section>
      <div class="two">
        <OneSide run={run} prompt={prompt} side="a" place={a ?? null} of={first} />
        <OneSide run={run} prompt={prompt} side="b" place={b ?? null} of={second} />
      </div>
      {first.data && second.data && (
        <Card title={t("textDifference")} hint={t("textDifferenceHint")} class="text-difference">
          <TextDifference before={first.data.response} after={second.data.response} />
        </Card>
      )}
    </section>
  );
}

interface Answer {
  data: Rollout | null;
  error: string | null;
}

const useRollout = (run: string, place: RolloutKey | null | undefined): Answer =>
  useResource<Rollout>(place ? rolloutAddress(run, place) : null);

interface SideProps {
  run: string;
  prompt: PromptPage;
  side: PromptSide;
  place: RolloutKey | null;
  of: Answer;
}

function OneSide({ run, prompt, side, place, of: { data, error } }: SideProps) {
  const t = useText();
  const { query } = useRoute();
  const known = ENDS.filter((end) => prompt[end] !== null);
  const words = { first: t("firstOne"), last: t("lastOne"), best: t("bestOne"), worst: t("worstOne") };
  const given = query[side];
  const same = (end: End): boolean => place !== null && placeText(prompt[end]!) === placeText(place);
  const chosen = isEnd(given) ? given : (known.find(same) ?? null);
  return (
    <section class="card side-of-prompt" aria-label={side.toUpperCase()}>
      <header>
        <h3>{side.toUpperCase()}</h3>
        <Segments
          options={Object.fromEntries(known.map((end) => [end, words[end]])) as Record<End, string>}
          chosen={chosen}
          onChoose={(end) => patchRoute({ [side]: end }, true)}
        />
        {data && (
          <>
            <b class="number">{number(data.reward)}</b>
            <Link to={tokensRoute(run, data.step, data.sample)}>
              {t("stepNumber", { step: data.step })} · {t("sampleNumber", { sample: data.sample })}
            </Link>
          </>
        )}
      </header>
      <Problem text={error} />
      {data && (
        <>
          <Conversation turns={turnsOf(data)} />
          <CutText whole={data.response_truncated} />
        </>
      )}
    </section>
  );
}
