"""What the page says of responses without a reward."""

from pathlib import Path
from typing import Any

import pytest
from browser_helpers import BoardProcess, opened
from index_helpers import new_run, record
from playwright.sync_api import expect

from cavesson.record import begin_attempt


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = new_run(tmp_path / "run")
    attempt = begin_attempt(folder, 0)
    record(folder, [0], attempt=attempt, reward=[1.0, None, -1.0, 5.0, None, None])
    record(folder, [1], attempt=attempt, reward=[None] * 6)
    return folder


def test_the_page_counts_them_and_shows_no_number(browser: Any, run: Path) -> None:
    with BoardProcess(run) as board:
        with opened(browser, f"{board.address}/step?step=0&groups=-mean") as page:
            groups = page.locator(".group")
            for number, (mean, unscored) in enumerate((("2 ± 3", 0), ("1 ± 0", 1), ("– ± –", 2))):
                expect(groups.nth(number).locator("header")).to_contain_text(mean)
                said = f"{unscored} of 2 without a reward"
                assert (said in groups.nth(number).inner_text()) == (unscored > 0)
            assert groups.nth(2).locator("button b").all_inner_texts() == ["–", "–"]
            expect(page.locator("main")).to_contain_text("3 of 6 without a value")
        with opened(browser, f"{board.address}/step?step=1") as page:
            expect(page.locator("main")).to_contain_text("6 of 6 without a value")
            assert "NaN" not in page.locator("main").inner_text()
        with opened(browser, f"{board.address}/compare?sides=run@0,run@1") as page:
            expect(page.locator(".wins")).to_contain_text("3 of 6 without a reward")
            expect(page.locator(".wins")).to_contain_text("6 of 6 without a reward")
            assert "NaN" not in page.locator("main").inner_text()
        for address in (
            "",
            "/responses?sort=reward",
            "/responses?sort=-reward",
            "/patterns",
            "/tokens?step=1&sample=0",
        ):
            with opened(browser, f"{board.address}{address}") as page:
                expect(page.locator("main")).to_be_visible()
                page.wait_for_load_state("networkidle")
                assert (
                    "NaN" not in page.locator("body").inner_text() and "null" not in page.locator("body").inner_text()
                )
