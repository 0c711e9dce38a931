"""Starts a server, looks at its live page with a real browser, and fails if something is wrong. It needs Chromium and
playwright:

    apt-get install chromium; python3 -m venv /tmp/browser; /tmp/browser/bin/pip install playwright==1.65.2
    /tmp/browser/bin/python tests/serving/browser.py [folder for screenshots]
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
PORT = 8765
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--no-first-run"]
EVIL = "<script>window.harmed=1</script><img src=x onerror='window.harmed=1'> & <b>bold</b>"
PIXELS = "id => { const c = document.getElementById(id); return c.toDataURL(); }"
# Pixels of each tenant's colour at the right of the chart of memory, and how many there should be by the last two
# samples.
COLUMN = """() => {
  const node = document.getElementById("memory"), context = node.getContext("2d");
  const data = context.getImageData(node.width - 2, 0, 1, node.height).data;
  const probe = document.createElement("canvas").getContext("2d");
  const colours = TENANTS.map(name => { probe.fillStyle = colour(name); probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data]; });
  const found = [0, 0, 0, 0];
  for (let y = 0; y < node.height; y++) {
    const far = colours.map(c => Math.hypot(...[0, 1, 2].map(i => c[i] - data[4 * y + i])));
    found[far.indexOf(Math.min(...far))]++;
  }
  const shares = past.slice(-2).map(row => row.slice(1, 5).map(value => value / (row[1] + row[2] + row[3] + row[4])));
  return [found, ...shares.map(row => row.map(value => value * node.height))];
}"""


def ask(url: str, words: str, tokens: int) -> None:
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": tokens, "temperature": 1.0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        response.read()


def traffic(url: str) -> list[threading.Thread]:
    """Requests whose prompts and lengths make experts move."""
    words = [f"{i}. Mr. Darcy was at the ball, and {'she walked on, ' * (2 + i)}" for i in range(7)]
    threads = [threading.Thread(target=ask, args=(url, text, 150), daemon=True) for text in words]
    for thread in threads:
        thread.start()
    return threads


def until(page: Page, expression: str, seconds: float = 60) -> None:
    """Waits until an expression in the page's script is true. Playwright's way needs `eval`, which the page's policy
    forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.1)


def say(page: Page, words: str) -> Any:
    """Sends a message and waits for the end of the answer. -> the answer's element"""
    answers = page.locator(".turn.assistant")
    count = answers.count()
    page.fill("#say", words)
    page.press("#say", "Enter")
    answers.nth(count).wait_for(state="attached")
    page.wait_for_selector("#send:text('Send')", timeout=120_000)
    return answers.nth(count)


def events(*deltas: dict[str, Any]) -> str:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def look(page: Page, url: str, shots: Path, name: str) -> None:
    wrong: list[str] = []
    page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#status.serving", timeout=120_000)

    answer = say(page, "Do you like dancing?")
    assert len(answer.locator(".text").inner_text()) > 5
    assert "first token" in answer.locator(".note").inner_text()

    threads = traffic(url)
    page.wait_for_selector("#heat-card:visible", timeout=20_000)
    page.wait_for_selector(".request .bar")
    bits = page.evaluate("map.resident.join('')")
    before = page.evaluate(PIXELS, "heat")
    until(page, f"map.resident.join('') !== '{bits}'")
    time.sleep(1.5)  # for flashes
    assert page.evaluate(PIXELS, "heat") != before
    until(page, "past.length > 3")
    page.screenshot(path=shots / f"{name}.png")
    totals = page.evaluate("past.map(row => row[1] + row[2] + row[3] + row[4])")
    assert len(set(totals)) == 1, totals
    assert totals[0] > 0
    columns = page.evaluate(COLUMN)
    for pixels, *shares in zip(*columns, strict=True):
        assert min(shares) - 4 <= pixels <= max(shares) + 4, columns
    for thread in threads:
        thread.join()

    say(page, EVIL)
    body = events({"reasoning_content": EVIL}, {"content": EVIL})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    answer = say(page, "Harm me")
    assert answer.locator(".text").inner_text() == EVIL
    assert not answer.locator("details").evaluate("node => node.open")
    assert answer.locator("details div").text_content() == EVIL
    assert page.evaluate("window.harmed") is None
    assert page.locator("#talk script, #talk img, #talk b").count() == 0
    page.unroute("**/v1/chat/completions")

    page.evaluate("document.getElementById('clear').click()")
    assert page.locator(".turn").count() == 0
    held: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))  # it never answers
    page.fill("#say", "Tell me a long story about Emma")
    page.press("#say", "Enter")
    page.click("#send:text('Stop')")
    page.wait_for_selector("#send:text('Send')")
    assert page.locator(".turn.assistant .note").inner_text() == "stopped"
    held[0].abort()

    width, inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner, f"{name}: {width} pixels wide in a window of {inner}"
    assert not wrong, wrong


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def look_at_the_end(page: Page, server: "subprocess.Popen[bytes]", shots: Path) -> None:
    """What the page says when a rank is killed, and when the server ends."""
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"http://127.0.0.1:{PORT}")
    page.wait_for_selector("#status.serving")
    (launcher,) = children(server.pid)
    os.kill(children(launcher)[0] if children(launcher) else launcher, signal.SIGKILL)
    page.wait_for_selector("#band:not(.mild):visible", timeout=5_000)
    page.screenshot(path=shots / "dead.png")
    page.wait_for_selector("#status.serving", timeout=120_000)
    page.wait_for_selector("#band", state="hidden")
    until(page, "past.length > 0 && map !== null")  # these ranks know that somebody watches
    state = {"at": 1, "model": "m", "status": "serving", "ttft": [None] * 2, "itl": [None] * 2, "prompts": [0, 0]}
    page.evaluate("s => { show({...s, preemptions: 3}); show({...s, preemptions: 5}); }", state)
    assert "2 requests were preempted" in page.locator("#band").inner_text()
    server.terminate()
    page.wait_for_selector("#status.bad:has-text('no connection')", timeout=30_000)
    assert page.locator("#band").inner_text() == "The server has ended. Trying again."
    page.screenshot(path=shots / "ended.png")
    assert server.wait(timeout=10) == 0
    assert not wrong, wrong


def main(shots: Path) -> None:
    shots.mkdir(parents=True, exist_ok=True)
    command = [ROOT / ".venv/bin/python", "-m", "umbra", "serve"]
    server = subprocess.Popen([*command, "--set", f"port={PORT}", "--set", "serve_config.restarts=1"], cwd=ROOT)
    url = f"http://127.0.0.1:{PORT}"
    try:
        time.sleep(3)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            for name, width, height, scheme in (
                ("wide", 1360, 860, "light"),
                ("dark", 1360, 860, "dark"),
                ("narrow", 390, 844, "light"),
            ):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                look(page, url, shots, name)
                page.screenshot(path=shots / f"{name}_end.png", full_page=True)
                page.close()
                print(f"{name}: good", flush=True)
            look_at_the_end(browser.new_page(), server, shots)
            print("end: good")
            browser.close()
    finally:
        server.terminate()


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or ["screenshots"]))
