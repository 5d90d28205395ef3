// The last two minutes of the server's metrics as small curves: a sample each second while the page is seen.

import { ask } from "/page/wire.js";

const NUM_SAMPLES = 120;
const PERIOD_MS = 1000;
const HEIGHT = 32;
const SAMPLE = /^(\w+)(?:\{(.*)\})? (\S+)$/;

// Returns the sum over the lines of a metric whose labels contain a text.
export function total(page, name, label = "") {
  let sum = 0;
  for (const line of page.split("\n")) {
    const found = SAMPLE.exec(line);
    if (found && found[1] === name && (found[2] || "").includes(label)) sum += Number(found[3]);
  }
  return sum;
}

const short = (value) => (value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toString());

class Curve {
  constructor(id) {
    const figure = document.getElementById(id);
    this.name = figure.querySelector("figcaption").firstChild.data.trim();
    this.shown = figure.querySelector("b");
    this.image = figure.querySelector("svg");
    this.samples = [];
  }

  add(value, most = null) {
    this.samples = [...this.samples, value].slice(-NUM_SAMPLES);
    const top = most || Math.max(1, ...this.samples);
    const first = NUM_SAMPLES - this.samples.length;
    const points = this.samples.map((each, place) =>
      `${first + place},${(HEIGHT - 1 - (each / top) * (HEIGHT - 2)).toFixed(1)}`);
    this.image.querySelector("polyline").setAttribute("points", points.join(" "));
    const ground = [`${NUM_SAMPLES - 1},${HEIGHT}`, `${first},${HEIGHT}`];
    this.image.querySelector("polygon").setAttribute("points", [...points, ...ground].join(" "));
    this.shown.textContent = most === null ? short(value) : `${short(value)}/${short(most)}`;
    this.image.setAttribute("aria-label", `${this.name}: ${this.shown.textContent} now, at most ` +
      `${short(Math.max(...this.samples))} in the last two minutes`);
  }

  forget() {
    this.shown.textContent = "-";
  }
}

// Asks again and again; tells `heard` how each question ended: null, or what was wrong.
export function watch(heard) {
  const curves = Object.fromEntries(
    ["tokens", "running", "queued", "blocks"].map((id) => [id, new Curve(id)]));
  let before = null; // tokens and time of the last sample
  let timer = null;

  function add(page) {
    const tokens = total(page, "colossalai_generated_tokens_total");
    const now = performance.now();
    if (before !== null) {
      const rate = ((tokens - before.tokens) * 1000) / (now - before.now);
      curves.tokens.add(Math.max(0, rate)); // a server that was started again counts from 0
    }
    before = { tokens, now };
    curves.running.add(total(page, "colossalai_requests_running"));
    curves.queued.add(total(page, "colossalai_requests_queued"));
    const used = total(page, "colossalai_kv_blocks", 'state="used"');
    curves.blocks.add(used, total(page, "colossalai_kv_blocks"));
  }

  async function sample() {
    try {
      add(await (await ask("/metrics")).text());
      heard(null);
    } catch (error) {
      before = null;
      Object.values(curves).forEach((curve) => curve.forget());
      heard(error);
    }
    timer = document.hidden ? null : setTimeout(sample, PERIOD_MS);
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && timer === null) {
      before = null; // the rate of the time between is of no second
      timer = setTimeout(sample, 0);
    }
  });
  timer = setTimeout(sample, 0);
}
