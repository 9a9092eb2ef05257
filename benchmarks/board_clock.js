// Times what a person sees, from an input event to the frames that show its consequences; runs before the page's scripts.
// board_looker.py says why it is right.
(() => {
  const QUIET_MS = 250; // without a change and without a request on its way, nothing more will come
  const MISSED_MS = 3000; // at rest without what was awaited: the input had no consequence
  const PATIENCE_MS = 60000;
  const marks = new Map(); // by the name of its probe: whether the awaited content is there, and when it was painted
  const box = document.createElement("div");
  // Above everything: a frame in which nothing that is in view changes would not be presented at all.
  box.style.cssText = "position:fixed;left:0;top:0;width:9px;height:9px;font-size:4px;z-index:2147483647";
  box.style.cssText += "contain:strict;pointer-events:none";
  let mark = null; // of the callback that runs
  let awaited = () => false;
  let seen = false; // what was awaited has come: it is not looked for again
  let marking = true;
  let kind = null; // of the input event that is waited for
  let start = 0;
  let changed = 0;
  let requests = 0;
  let number = 0;

  function change() {
    changed = performance.now();
    if (mark || !marking || !document.documentElement) return;
    mark = { there: false, painted: 0 };
    const probe = document.createElement("div");
    probe.setAttribute("elementtiming", `probe-${number++}`);
    probe.textContent = "x";
    probe.style.cssText = "position:absolute;left:0;top:0"; // on top of each other: what is cut off is never painted
    marks.set(probe.getAttribute("elementtiming"), mark);
    if (!box.isConnected) document.documentElement.append(box);
    box.append(probe);
    queueMicrotask(() => {
      const made = mark;
      mark = null;
      if (!seen) made.there = seen = Boolean(awaited());
    });
  }

  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) {
      const painted = marks.get(entry.identifier);
      if (painted) painted.painted = entry.presentationTime ?? entry.renderTime;
    }
  }).observe({ type: "element", buffered: true });

  new MutationObserver((records) => {
    if (records.some(({ target, addedNodes }) => target !== box && addedNodes[0] !== box)) change();
  }).observe(document, { subtree: true, childList: true, characterData: true, attributes: true });

  for (const name of ["clearRect", "drawImage", "fill", "fillRect", "fillText", "putImageData", "stroke", "strokeRect"]) {
    const real = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...given) {
      change();
      return real.apply(this, given);
    };
  }

  const fetch = window.fetch;
  window.fetch = (...given) => {
    requests++;
    return fetch(...given).finally(() => requests--);
  };

  for (const type of ["click", "keydown", "pointerdown", "wheel"]) {
    const note = (event) => {
      if (kind === type) [start, kind] = [event.timeStamp, null];
    };
    addEventListener(type, note, { capture: true, passive: true });
  }

  /** Waits for the next input event of a type; `condition` says whether what it leads to is in the page. */
  function arm(type, condition) {
    box.replaceChildren();
    marks.clear();
    [kind, awaited, seen] = [type, condition, false];
  }

  const paints = (found) => found.map(({ painted }) => painted);
  const pause = () => new Promise((resume) => setTimeout(resume, 20));
  const quiet = () => performance.now() - changed > QUIET_MS && requests === 0;

  async function rest() {
    while (!quiet()) await pause();
  }

  /**
   * Milliseconds from the event to the first frame with what was awaited and to the last that changed; null if none.
   *
   * @param mayMiss whether the event may have had no effect; the page's own start has one, however late
   */
  async function reaction(patient = true, mayMiss = true) {
    const began = performance.now();
    while (performance.now() - began < PATIENCE_MS) {
      await pause();
      const all = [...marks.values()];
      const there = all.find((one) => one.there);
      const missed = kind === null && !there && quiet() && performance.now() - Math.max(start, began) > MISSED_MS;
      if (missed && mayMiss) return null;
      if (kind !== null || !there?.painted || (patient && !(quiet() && all.every((one) => one.painted)))) continue;
      return { shown: there.painted - start, all: Math.max(...paints(all)) - start };
    }
    throw new Error(kind === null ? "what was awaited was never painted" : `no ${kind} event came`);
  }

  /** For what comes without an input: the page's own start. */
  function expect(condition) {
    [start, awaited, seen] = [0, condition, false];
  }

  /** The first frame with what is expected, in milliseconds since 1970. */
  async function painted() {
    return performance.timeOrigin + (await reaction(false, false)).shown;
  }

  /** How long each frame took while `ms` milliseconds passed; no frame is marked meanwhile, which would take its time. */
  function frames(ms) {
    marking = false;
    return new Promise((resolve) => {
      const times = [];
      const next = (time) => {
        times.push(time);
        if (time - times[0] < ms) requestAnimationFrame(next);
        else resolve(times.slice(1).map((after, i) => after - times[i]));
      };
      requestAnimationFrame(next);
    });
  }

  window.boardClock = { arm, expect, frames, painted, reaction, rest };
})();
