// Bundles the page: node build.mjs [OUT] [--watch]. OUT is ../static unless given.
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import * as esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const given = process.argv.slice(2).find((argument) => !argument.startsWith("--"));
const out = given ? resolve(given) : join(here, "..", "static");

/** Writes each file below the licences of the packages in it, which their minified code does not contain. */
const licensed = {
  name: "licensed",
  setup(build) {
    build.onEnd(({ outputFiles = [], metafile }) => {
      for (const { path, contents } of outputFiles) {
        const [, { inputs }] = Object.entries(metafile.outputs).find(([name]) => basename(name) === basename(path));
        const names = Object.keys(inputs).map((name) => /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(name)?.[1]);
        const packages = [...new Set(names)].filter(Boolean).sort();
        const notices = packages.map(
          (name) => `/*! ${name}\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim()}\n*/\n`,
        );
        const content = Buffer.concat([Buffer.from(notices.join("")), contents]);
        const packed = gzipSync(content, { level: 9 });
        writeFileSync(path, content);
        writeFileSync(`${path}.gz`, packed); // what the board sends
        const size = `${(content.length / 1024).toFixed(0)} KB, ${(packed.length / 1024).toFixed(1)} KB gzipped`;
        console.log(`${basename(path)} ${size}, with ${packages.join(", ")}`);
      }
    });
  },
};

const options = {
  entryPoints: Object.fromEntries(
    Object.entries({ board: "main.tsx", markdown: "markdown.ts", zh: "i18n/zh.ts", vi: "i18n/vi.ts" }).map(
      ([name, file]) => [name, join(here, "src", file)],
    ),
  ),
  outdir: out,
  bundle: true,
  format: "iife", // a classic script also runs inside an exported file opened from disk
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  minify: true,
  legalComments: "none",
  charset: "utf8",
  logLevel: "warning",
  write: false,
  metafile: true,
  plugins: [licensed],
};

mkdirSync(out, { recursive: true });
// What the doctor's findings mean, in Markdown by the names of the rules, without the pictures.
const docs = join(here, "..", "..", "..", "..", "docs", "diagnosis");
const names = readdirSync(docs).filter((name) => name.endsWith(".md") && name !== "README.md");
const pageOf = (name) =>
  readFileSync(join(docs, name), "utf8")
    .replace(/^!\[.*\n\n/m, "")
    .replace(/\n\[All findings\].*\n$/, "");
const pages = Object.fromEntries(names.sort().map((name) => [name.slice(0, -".md".length), pageOf(name)]));
writeFileSync(join(out, "diagnosis.json"), JSON.stringify(pages));
// Browsers ask for an icon anew at every change of the address, unless it stands in the page.
const icon = `data:image/svg+xml,${encodeURIComponent(readFileSync(join(here, "icon.svg"), "utf8"))}`;
writeFileSync(join(out, "index.html"), readFileSync(join(here, "index.html"), "utf8").replace("icon.svg", icon));

if (process.argv.includes("--watch")) {
  const context = await esbuild.context({ ...options, logLevel: "info" });
  await context.watch();
} else {
  await esbuild.build(options);
}
