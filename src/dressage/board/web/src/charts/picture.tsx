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

  useLayoutEffect(() => paint(canvas.current!, latest.current, height));
  useLayoutEffect(() => {
    const watcher = new ResizeObserver(() => paint(canvas.current!, latest.current, height));
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

function paint(canvas: HTMLCanvasElement, draw: Draw, height: number): void {
  const width = canvas.clientWidth;
  if (width === 0) return;
  const ratio = devicePixelRatio;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  draw(new CanvasPen(context, palette().sans), width, height);
}
