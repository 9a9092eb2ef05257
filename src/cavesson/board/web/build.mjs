// Bundles the page: node build.mjs [OUT] [--watch]. OUT is ../static unless given.
import { mkdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import * as esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const given = process.argv.slice(2).find((argument) => !argument.startsWith("--"));
const out = given ? resolve(given) : join(here, "..", "static");

const options = {
  entryPoints: { board: join(here, "src", "main.tsx") },
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
};

mkdirSync(out, { recursive: true });
// Browsers ask for an icon anew at every change of the address, unless it stands in the page.
const icon = `data:image/svg+xml,${encodeURIComponent(readFileSync(join(here, "icon.svg"), "utf8"))}`;
writeFileSync(join(out, "index.html"), readFileSync(join(here, "index.html"), "utf8").replace("icon.svg", icon));

if (process.argv.includes("--watch")) {
  const context = await esbuild.context({ ...options, logLevel: "info" });
  await context.watch();
} else {
  await esbuild.build(options);
  const sizes = ["board.js", "board.css"].map((name) => {
    const path = join(out, name);
    return `${name} ${(statSync(path).size / 1024).toFixed(0)} KB, ${(gzipSync(readFileSync(path)).length / 1024).toFixed(1)} KB gzipped`;
  });
  console.log(sizes.join("; "));
}
