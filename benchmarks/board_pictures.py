"""Draws the pictures of the board in docs/images: benchmarks/board_pictures.py runs/demo."""

import argparse
import shutil
import sys
from pathlib import Path
from urllib.parse import urlencode

from board import Server
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs/images"
QUERY = """SELECT step, avg(reward) AS reward, avg(kl_k1) AS kl
FROM rows
WHERE coalesce(split, 'train') = 'train'
GROUP BY step
ORDER BY step"""
PICTURES = {
    "board": (
        "tokens?step=18&sample=12&metric=kl_k1&token=2&strips=kl_k1,value,token_reward,entropy",
        1200,
        860,
    ),
    "board-overview": ("overview", 1200, 780),
    "board-step": ("step?step=19", 1200, 560),
    "board-responses": ("responses?q=wonderful&sort=-reward&at=18.6", 1200, 620),
    "board-patterns": ("patterns?kind=word&sort=reward_effect", 1200, 760),
    "board-compare": ("compare?sides={run}%400-3,{run}%4016-19", 1340, 760),
    "board-sql": (f"sql?{urlencode({'query': QUERY})}", 1200, 820),
}
"""By name: the address, and the size of the window in pixels."""


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run", type=Path, help="folder of a demo's run")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with Server(given.run) as server, sync_playwright() as playwright:
        server.wait(lambda: server.get("runs")[0]["indexed"] == 1)
        run = server.get("runs")[0]["run"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        wrong: list[str] = []
        for name, (address, width, height) in PICTURES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("response", lambda one: wrong.append(f"{one.status} {one.url}") if one.status >= 400 else None)
            page.goto(f"{server.base}/{address.format(run=run)}")
            page.wait_for_load_state("networkidle")
            page.screenshot(path=given.out / f"{name}.png")
            page.close()
        if wrong:
            sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
