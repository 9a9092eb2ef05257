/** How patterns spread: the share of responses that have them over the run, each curve named at its end. */

import { useCallback } from "preact/hooks";
import type { Pattern, Steps } from "../api/types";
import { useText } from "../i18n";
import { Card } from "../parts/card";
import { percent } from "../maths/format";
import { apart } from "../maths/numbers";
import { visible } from "../maths/text";
import { type Frame, horizontal, leftAxis, vertical, bottomAxis } from "./axes";
import { curveColour } from "./line-spec";
import { type Palette, usePalette } from "./palette";
import { type Pen, type Point, straight, svgOf } from "./pen";
import { Picture } from "./picture";

interface Props {
  title: string;
  hint: string;
  steps: Steps[];
  /** patterns by the curve that they share; the first gives it its name */
  lines: Pattern[][];
  step: number;
  onStep: (step: number) => void;
  onPattern: (pattern: Pattern) => void;
}

const HEIGHT = 230;

export function SpreadChart({ title, hint, steps, lines, step, onStep, onPattern }: Props) {
  const t = useText();
  const colours = usePalette();
  const drawHere = useCallback(
    (pen: Pen, width: number, height: number): void => draw(pen, frameOf(width, height), steps, lines, step, colours),
    [steps, lines, step, colours],
  );
  const drawFile = (pen: Pen): void => draw(pen, frameOf(860, 380, 36), steps, lines, step, colours);
  const pick = (x: number, _: number, width: number): void => {
    const frame = frameOf(width, HEIGHT);
    const bucket = Math.round(((x - frame.left) / (frame.right - frame.left)) * (steps.length - 1));
    const chosen = steps[Math.min(steps.length - 1, Math.max(0, bucket))];
    if (chosen) onStep(chosen[1]);
  };
  return (
    <Card title={title} level={2} hint={hint} save={() => svgOf(860, 380, colours, drawFile, title)}>
      <div class="legend">
        {lines.map((patterns, i) => (
          <span key={nameOf(patterns[0]!)} class="keys" title={patterns.length > 1 ? t("sameCurve") : undefined}>
            {patterns.slice(0, NAMED).map((pattern, at) => (
              <Name
                key={nameOf(pattern)}
                pattern={pattern}
                colour={at === 0 ? curveColour(colours, i) : null}
                onPattern={onPattern}
              />
            ))}
            {patterns.length > NAMED && <span class="muted">= … +{patterns.length - NAMED}</span>}
          </span>
        ))}
      </div>
      <Picture height={HEIGHT} label={title} draw={drawHere} onClick={pick} />
    </Card>
  );
}

/** Of the patterns of one curve so many are named in the legend. */
const NAMED = 4;

const nameOf = ({ kind, text }: Pattern): string => `${kind} ${text}`;

interface NameProps {
  pattern: Pattern;
  /** null = it has the curve of the pattern before it */
  colour: string | null;
  onPattern: (pattern: Pattern) => void;
}

function Name({ pattern, colour, onPattern }: NameProps) {
  return (
    <button type="button" class="key quiet" onClick={() => onPattern(pattern)}>
      {colour === null ? "= " : <i style={{ background: colour }} />}
      <bdi>{label(pattern.text)}</bdi>{" "}
      {colour !== null && (
        <b>
          {percent(pattern.first)} → {percent(pattern.last)}
        </b>
      )}
    </button>
  );
}

function frameOf(width: number, height: number, top = 8): Frame {
  return { left: 46, top, right: width - Math.min(120, width * 0.3), bottom: height - 22 };
}

function label(text: string, most = 24): string {
  const shown = visible(text).replace(/\n/g, "↵").replace(/^ | $/g, "·");
  return shown.length > most ? `${shown.slice(0, most - 1)}…` : shown;
}

/** Beside the curves there is room for so many letters. */
const AT_END = 9;

function draw(pen: Pen, frame: Frame, steps: Steps[], lines: Pattern[][], step: number, colours: Palette): void {
  const patterns = lines.map(([first]) => first!);
  const shares = patterns.flatMap((pattern) => pattern.share).filter((share) => share !== null);
  const tallest = Math.max(0.05, ...shares);
  const [first, last] = [steps[0]?.[0] ?? 0, steps[steps.length - 1]?.[1] ?? 1];
  const x = horizontal(frame, first, last);
  const y = vertical(frame, 0, tallest * 1.05);
  leftAxis(pen, frame, 0, tallest * 1.05, colours, (share) => percent(share, 0));
  bottomAxis(pen, frame, first, last, colours);
  straight(pen, [x(step), frame.top], [x(step), frame.bottom], { colour: colours.accent });
  const ends = patterns.map(({ share }) => y(lastOf(share) ?? 0));
  const places = apart(ends, 14, frame.bottom);
  patterns.forEach((pattern, i) => {
    const colour = curveColour(colours, i);
    const points = pattern.share.flatMap((share, at): Point[] => {
      const place = steps[at];
      return share === null || !place ? [] : [[x((place[0] + place[1]) / 2), y(share)]];
    });
    pen.line(points, { colour, width: 1.8 });
    const others = lines[i]!.length > 1 ? ` +${lines[i]!.length - 1}` : "";
    const name = label(pattern.text, AT_END) + others;
    const words = { colour, size: 11.5, bold: true };
    pen.text(frame.right + 8, places[i]! + 4, `${name} ${percent(lastOf(pattern.share))}`, words);
  });
}

function lastOf(share: (number | null)[]): number | null {
  return share.findLast((value) => value !== null) ?? null;
}
