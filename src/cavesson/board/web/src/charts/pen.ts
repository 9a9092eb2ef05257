/** Draws the same picture on a canvas or as SVG. */

import { visible } from "../maths/text";
import type { Palette } from "./palette";

export interface Stroke {
  colour: string;
  width?: number;
  dash?: number[];
}

export interface Words {
  colour: string;
  size?: number;
  align?: "left" | "center" | "right";
  bold?: boolean;
}

export type Point = readonly [x: number, y: number];
export type SvgFile = [svg: string, width: number, height: number];

export interface Pen {
  line: (points: readonly Point[], stroke: Stroke) => void;
  area: (points: readonly Point[], colour: string) => void;
  rect: (x: number, y: number, width: number, height: number, colour: string) => void;
  text: (x: number, y: number, text: string, words: Words) => void;
}

export class CanvasPen implements Pen {
  constructor(
    private readonly context: CanvasRenderingContext2D,
    private readonly font: string,
  ) {}

  private path(points: readonly Point[]): void {
    this.context.beginPath();
    points.forEach(([x, y], i) => (i === 0 ? this.context.moveTo(x, y) : this.context.lineTo(x, y)));
  }

  line(points: readonly Point[], { colour, width = 1, dash = [] }: Stroke): void {
    this.path(points);
    this.context.strokeStyle = colour;
    this.context.lineWidth = width;
    this.context.lineJoin = "round";
    this.context.setLineDash(dash);
    this.context.stroke();
  }

  area(points: readonly Point[], colour: string): void {
    this.path(points);
    this.context.fillStyle = colour;
    this.context.fill();
  }

  rect(x: number, y: number, width: number, height: number, colour: string): void {
    this.context.fillStyle = colour;
    this.context.fillRect(x, y, width, height);
  }

  text(x: number, y: number, text: string, { colour, size = 11, align = "left", bold = false }: Words): void {
    this.context.fillStyle = colour;
    this.context.font = `${bold ? "600 " : ""}${size}px ${this.font}`;
    this.context.textAlign = align;
    this.context.fillText(visible(text), x, y);
  }
}

export class SvgPen implements Pen {
  private readonly parts: string[] = [];

  constructor(private readonly font: string) {}

  line(points: readonly Point[], { colour, width = 1, dash = [] }: Stroke): void {
    const dashes = dash.length > 0 ? ` stroke-dasharray="${dash.join(" ")}"` : "";
    const style = `fill="none" stroke="${colour}" stroke-width="${width}" stroke-linejoin="round"`;
    this.parts.push(`<polyline points="${listed(points)}" ${style}${dashes}/>`);
  }

  area(points: readonly Point[], colour: string): void {
    this.parts.push(`<polygon points="${listed(points)}" fill="${colour}"/>`);
  }

  rect(x: number, y: number, width: number, height: number, colour: string): void {
    const [left, top, wide, high] = [x, y, width, height].map(short);
    this.parts.push(`<rect x="${left}" y="${top}" width="${wide}" height="${high}" fill="${colour}"/>`);
  }

  text(x: number, y: number, text: string, { colour, size = 11, align = "left", bold = false }: Words): void {
    const anchor = { left: "start", center: "middle", right: "end" }[align];
    const weight = bold ? ' font-weight="600"' : "";
    this.parts.push(
      `<text x="${short(x)}" y="${short(y)}" fill="${colour}" font-size="${size}" text-anchor="${anchor}"${weight}>` +
        `${escaped(visible(text))}</text>`,
    );
  }

  svg(width: number, height: number, background: string): string {
    return (
      `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" ` +
      `font-family="${escaped(this.font)}"><rect width="100%" height="100%" fill="${background}"/>` +
      `${this.parts.join("")}</svg>`
    );
  }
}

/** A straight line. */
export function straight(pen: Pen, from: Point, to: Point, stroke: Stroke): void {
  pen.line([from, to], stroke);
}

/** A drawing as a separate file, below its title: SVG, width and height. */
export function svgOf(width: number, height: number, colours: Palette, draw: (pen: Pen) => void, title = ""): SvgFile {
  const pen = new SvgPen(colours.sans);
  if (title) pen.text(16, 22, title, { colour: colours.ink, size: 15, bold: true });
  draw(pen);
  return [pen.svg(width, height, colours.surface), width, height];
}

const short = (value: number): string => String(Math.round(value * 100) / 100);

const listed = (points: readonly Point[]): string => points.map(([x, y]) => `${short(x)},${short(y)}`).join(" ");

const ENTITIES: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

/** XML's text: its five signs escaped, characters that XML forbids taken out. */
export function escaped(text: string): string {
  return text
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "")
    .toWellFormed()
    .replace(/[&<>"]/g, (sign) => ENTITIES[sign]!);
}
