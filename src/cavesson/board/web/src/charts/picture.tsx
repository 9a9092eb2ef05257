/** A canvas that fills its place, stays sharp, and is drawn anew when what it draws or its size changes. */

import { useLayoutEffect, useRef } from "preact/hooks";
import { palette } from "./palette";
import { CanvasPen, type Pen } from "./pen";
import { forgetWidth, withWidth } from "./widths";

export type Draw = (pen: Pen, width: number, height: number) => void;

interface Props {
  /** drawn again when this is another function, so it is to be remembered */
  draw: Draw;
  height: number;
  label: string;
  class?: string;
  onPoint?: ((x: number | null, y: number, width: number) => void) | undefined;
  onClick?: ((x: number, y: number, width: number) => void) | undefined;
}

export function Picture({ draw, height, label, class: kind = "", onPoint, onClick }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useLayoutEffect(() => {
    const place = canvas.current!;
    const drawAt = (width: number): void => paint(place, draw, width, height);
    const known = painted.get(place);
    if (known === undefined) withWidth(place, drawAt);
    else drawAt(known);
    const watcher = new ResizeObserver(() => {
      if (painted.get(place) !== place.clientWidth) withWidth(place, drawAt);
    });
    watcher.observe(place);
    return () => {
      watcher.disconnect();
      forgetWidth(place);
    };
  }, [draw, height]);

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

/** The width each canvas was last drawn for. */
const painted = new WeakMap<HTMLCanvasElement, number>();

function paint(canvas: HTMLCanvasElement, draw: Draw, width: number, height: number): void {
  const ratio = devicePixelRatio;
  painted.set(canvas, width);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  draw(new CanvasPen(context, palette().sans), width, height);
}
