"""The pictures of the server's page in docs/, taken from a server that runs.

    knockon serve --model-path smollm2-135m --speculative-draft-model-path smollm2-135m-domino
    python benchmarks/page_screenshots.py http://127.0.0.1:30000/

Needs a Chromium on the PATH, and playwright and pillow from the extra `test`. The numbers shown are
the machine's: take them when it has nothing else to do.
"""

from __future__ import annotations

import argparse
import io
import shutil
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect, sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
SIZES = {"desktop": (1120, 640), "phone": (390, 760)}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--question", default="Explain why the sky is blue.")
    parser.add_argument("--tokens", type=int, default=90, help="shoot after so many")
    parser.add_argument("--folder", type=Path, default=DOCS)
    args = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(args.url)
            page.get_by_label("Message").fill(args.question)
            page.get_by_label("Message").press("Enter")
            send, count = page.locator("#send"), page.locator("#count")
            expect(count).not_to_have_text("–", timeout=60_000)
            while send.inner_text() == "Stop" and int(count.inner_text()) < args.tokens:
                time.sleep(0.02)
            picture = Image.open(io.BytesIO(page.screenshot()))
            few = picture.convert("RGB").quantize(160, dither=Image.Dither.NONE)
            few.save(args.folder / f"page-{name}.png", optimize=True)
            print(name, page.locator("#numbers").inner_text().split())
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
