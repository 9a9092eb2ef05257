/** A canvas that fills its place, stays sharp, and is drawn anew when its data, its size or the colours change. */

import { useLayoutEffect, useRef } from "preact/hooks";
import { appearance } from "../state/preferences";
import { useStore } from "../state/store";
import { palette } from "./palette";
import { CanvasPen, type Pen } from "./pen";

export type Draw = (pen: Pen, width: number, height: number) => void;

interface Props {
  draw: Draw;
  height: number;
  label: string;
  class?: string;
  onPoint?: ((x: number | null, y: number, width: number) => void) | undefined;
  onClick?: ((x: number, y: number, width: number) => void) | undefined;
}

export function Picture({ draw, height, label, class: kind = "", onPoint, onClick }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const latest = useRef(draw);
  latest.current = draw;
  useStore(appearance);

  useLayoutEffect(() => soon(canvas.current!, { draw: latest.current, height }));
  useLayoutEffect(() => {
    const watcher = new ResizeObserver(() => {
      if (painted.get(canvas.current!) !== canvas.current!.clientWidth)
        soon(canvas.current!, { draw: latest.current, height });
    });
    watcher.observe(canvas.current!);
    return () => watcher.disconnect();
  }, [height]);

  const at = (event: MouseEvent): [number, number, number] => {
    const box = canvas.current!.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top, box.width];
  };
  return (
    <canvas
      ref={canvas}
      class={`picture ${kind} ${onClick ? "clickable" : ""}`}
      style={{ height: `${height}px` }}
      role="img"
      aria-label={label}
      onMouseMove={onPoint && ((event) => onPoint(...at(event)))}
      onMouseLeave={onPoint && (() => onPoint(null, 0, 0))}
      onClick={onClick && ((event) => onClick(...at(event)))}
    />
  );
}

interface Job {
  draw: Draw;
  height: number;
}

/** What has to be drawn before the browser shows the page. */
const waiting = new Map<HTMLCanvasElement, Job>();

/** The width each canvas was last drawn for. */
const painted = new WeakMap<HTMLCanvasElement, number>();

function soon(canvas: HTMLCanvasElement, job: Job): void {
  if (waiting.size === 0) queueMicrotask(paintAll);
  waiting.set(canvas, job);
}

/** All widths are read before anything is drawn: drawing makes the browser lay the page out anew for the next width. */
function paintAll(): void {
  const jobs = Array.from(waiting, ([canvas, job]) => ({ canvas, ...job, width: canvas.clientWidth }));
  waiting.clear();
  for (const job of jobs) if (job.width > 0) paint(job.canvas, job.draw, job.width, job.height);
}

function paint(canvas: HTMLCanvasElement, draw: Draw, width: number, height: number): void {
  const ratio = devicePixelRatio;
  painted.set(canvas, width);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  draw(new CanvasPen(context, palette().sans), width, height);
}
