/** Markdown and LaTeX as elements. Nothing recorded becomes markup: links are not followed, and HTML stays text. */

import type { Token, Tokens } from "marked";
import { createContext, type ComponentChildren } from "preact";
import { useContext, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { useText } from "../i18n";
import { visible } from "../maths/text";
import { inSnapshot } from "../api/snapshot";
import type { Libraries } from "../markdown";
import type { Route } from "../state/router";
import { Link } from "./link";
import { useMarkdown } from "./markdown-script";
import { Text } from "./text";

/** Where a link leads to within the page, for a text that is not recorded; null for any other link. */
export const LinkRoute = createContext<(href: string) => Route | null>(() => null);

/** Longer texts are shown as they are. */
const LONGEST = 100_000;

interface Formula {
  type: "formula";
  raw: string;
  tex: string;
  display: boolean;
}

const DISPLAY = /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])/;
const INLINE = /^(?:\$(?![\s$])((?:\\.|[^$\\\n])+?)(?<!\s)\$(?!\d)|\\\(([^]+?)\\\))/;

function formula(source: string, pattern: RegExp, display: boolean): Formula | undefined {
  const found = pattern.exec(source);
  return found ? { type: "formula", raw: found[0], tex: (found[1] ?? found[2])!, display } : undefined;
}

const startOf = (source: string): number | undefined => {
  const at = source.search(/\$|\\[([]/);
  return at < 0 ? undefined : at;
};

const FORMULAS = {
  name: "formula",
  level: "inline" as const,
  start: startOf,
  tokenizer: (source: string) => formula(source, DISPLAY, true) ?? formula(source, INLINE, false),
};

/** Until the libraries are loaded, the text as it is. */
export function Rendered({ text }: { text: string }) {
  const t = useText();
  const libraries = useMarkdown();
  const tokens = useMemo(() => libraries && parsed(text, libraries), [text, libraries]);
  if (tokens) return <div class="rendered">{drawn(tokens)}</div>;
  return (
    <>
      {(libraries || inSnapshot) && <p class="muted">{t(libraries ? "notRendered" : "notExported")}</p>}
      <Text text={text} search="" />
    </>
  );
}

/** Null for a text that is too long, or nested too deeply. */
function parsed(text: string, { Marked }: Libraries): Token[] | null {
  if (text.length > LONGEST) return null;
  try {
    return new Marked({ extensions: [FORMULAS] }).lexer(text);
  } catch (error) {
    if (error instanceof RangeError) return null;
    throw error;
  }
}

const drawn = (tokens: readonly Token[] | undefined): ComponentChildren => tokens?.map((token, i) => draw(token, i));

function draw(token: Token, key: number): ComponentChildren {
  const inside = (): ComponentChildren => drawn((token as { tokens?: Token[] }).tokens);
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return (
        <p key={key} class="heading">
          {inside()}
        </p>
      );
    case "paragraph":
      return <p key={key}>{inside()}</p>;
    case "blockquote":
      return <blockquote key={key}>{inside()}</blockquote>;
    case "strong":
      return <b key={key}>{inside()}</b>;
    case "em":
      return <i key={key}>{inside()}</i>;
    case "del":
      return <del key={key}>{inside()}</del>;
    case "br":
      return <br key={key} />;
    case "hr":
      return <hr key={key} />;
    case "code":
      return (
        <pre key={key} class="code">
          {visible((token as Tokens.Code).text)}
        </pre>
      );
    case "codespan":
      return <code key={key}>{visible((token as Tokens.Codespan).text)}</code>;
    case "list":
      return <List key={key} list={token as Tokens.List} />;
    case "table":
      return <Table key={key} table={token as Tokens.Table} />;
    case "link":
    case "image":
      return <Address key={key} to={(token as Tokens.Link).href} text={(token as Tokens.Link).text} />;
    case "formula":
      return <Tex key={key} {...(token as unknown as Formula)} />;
    case "text":
      return (token as Tokens.Text).tokens ? inside() : visible((token as Tokens.Text).text);
    case "escape":
      return visible((token as Tokens.Escape).text);
    default:
      return visible(token.raw);
  }
}

function List({ list }: { list: Tokens.List }) {
  const items = list.items.map((item, i) => <li key={i}>{drawn(item.tokens)}</li>);
  return list.ordered ? <ol start={Number(list.start) || 1}>{items}</ol> : <ul>{items}</ul>;
}

function Table({ table }: { table: Tokens.Table }) {
  return (
    <table class="plain">
      <thead>
        <tr>
          {table.header.map((cell, i) => (
            <th key={i}>{drawn(cell.tokens)}</th>
          ))}
        </tr>
      </thead>
      <tbody>
        {table.rows.map((row, i) => (
          <tr key={i}>
            {row.map((cell, j) => (
              <td key={j}>{drawn(cell.tokens)}</td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** Where a link leads is text, too. */
function Address({ to, text }: { to: string; text: string }) {
  const route = useContext(LinkRoute)(to);
  if (route) return <Link to={route}>{visible(text)}</Link>;
  return (
    <>
      {visible(text)}
      {to !== text && <span class="muted"> ({visible(to)})</span>}
    </>
  );
}

function Tex({ tex, display }: Formula) {
  const box = useRef<HTMLSpanElement>(null);
  const libraries = useMarkdown();
  useLayoutEffect(() => {
    const options = { displayMode: display, throwOnError: false, trust: false, maxExpand: 200 };
    libraries?.temml.render(visible(tex), box.current!, { ...options, maxSize: [20, 500] });
  }, [tex, display, libraries]);
  return <span ref={box} class={display ? "formula display" : "formula"} />;
}
