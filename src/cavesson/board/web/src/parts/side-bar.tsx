/** Chooses what is compared. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { curveColour } from "../charts/line-spec";
import { usePalette } from "../charts/palette";
import { useText } from "../i18n";
import type { Side } from "../maths/sides";
import { runs } from "../state/board";
import { parseSteps } from "../state/selection";
import { useStore } from "../state/store";

export function useSideName(): (side: Side) => string {
  const all = useStore(runs)!;
  return ({ run, steps }) => {
    const name = all.find((one) => one.run === run)?.name ?? run;
    return steps ? `${name} ${steps[0]}–${steps[1]}` : name;
  };
}

interface Props {
  sides: Side[];
  onChange: (sides: Side[]) => void;
  /** what stands beside them */
  children: ComponentChildren;
}

const MAX_SIDES = 6;

export function SideBar({ sides, onChange, children }: Props) {
  const t = useText();
  const replace = (at: number, side: Side): void => onChange(sides.map((one, i) => (i === at ? side : one)));
  return (
    <div class="bar">
      {sides.map((side, i) => (
        <SideField
          key={i}
          index={i}
          side={side}
          onChange={(next) => replace(i, next)}
          {...(sides.length > 2 ? { onRemove: () => onChange(sides.filter((_, at) => at !== i)) } : {})}
        />
      ))}
      {sides.length < MAX_SIDES && (
        <button type="button" onClick={() => onChange([...sides, sides[sides.length - 1]!])}>
          + {t("addSide")}
        </button>
      )}
      {children}
    </div>
  );
}

interface FieldProps {
  index: number;
  side: Side;
  onChange: (side: Side) => void;
  onRemove?: () => void;
}

function SideField({ index, side, onChange, onRemove }: FieldProps) {
  const t = useText();
  const colours = usePalette();
  const all = useStore(runs)!;
  const [text, setText] = useState(side.steps?.join("–") ?? "");
  // Another side has this place once one before it is removed, and the address may change.
  useEffect(() => setText(side.steps?.join("–") ?? ""), [side.steps?.join()]);
  const range = parseSteps(text);
  const enter = (): void => {
    const steps = range?.split("-").map(Number) as [number, number] | undefined;
    if (text === "" || steps) onChange({ run: side.run, steps: steps ?? null });
  };
  return (
    <span class="side">
      <i style={{ background: curveColour(colours, index) }} />
      <select
        value={side.run}
        aria-label={t("run")}
        onChange={(event) => onChange({ ...side, run: event.currentTarget.value })}
      >
        {all.map((run) => (
          <option key={run.run} value={run.run}>
            {run.name}
          </option>
        ))}
      </select>
      <input
        class={`steps ${text !== "" && !range ? "wrong" : ""}`}
        placeholder={t("allSteps")}
        title={t("stepRange")}
        aria-label={t("stepRange")}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onBlur={enter}
        onKeyDown={(event) => event.key === "Enter" && enter()}
      />
      {onRemove && (
        <button type="button" class="quiet" aria-label={t("remove")} onClick={onRemove}>
          ✕
        </button>
      )}
    </span>
  );
}
