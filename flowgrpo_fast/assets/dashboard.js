// The live page: asks for new rows of metrics.jsonl every 2 s and for the list of samples every 10 s, and draws what changed.
"use strict";

const ROWS_EVERY = 2000, SAMPLES_EVERY = 10000; // ms
const COLORS = 8, MOST_POINTS = 600;

const run = { next: 0, file: "", columns: new Map(), times: [], steps: [], charts: [], corrupt: 0 };
const byId = (id) => document.getElementById(id);
const esc = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

// Numbers, as charts.py writes them.

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 99999.5) {
    const [mantissa, exponent] = value.toExponential(2).split("e");
    return `${Number(mantissa)}×${powerOfTen(Number(exponent))}`.replace("-", "−");
  }
  return (size >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3)).replace("-", "−");
}
const powerOfTen = (exponent) => "10" + String(exponent).replace(/./g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
const percent = (value) => (value === 0 || Math.abs(value) >= 5e-4 ? `${(100 * value).toFixed(1)}%` : `${number(100 * value)}%`);
const near_one = (value) => String(Number(value.toPrecision(6)));
const LABELS = { number, percent, near_one };

function seconds(value) {
  if (value < 9.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value), two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

// The data: a column of [step, value] for each metric; null is a gap.

function take(answer) {
  if (answer.restart) Object.assign(run, { columns: new Map(), times: [], steps: [], corrupt: 0 });
  for (const { step, time, ...values } of answer.rows) {
    run.steps.push(step);
    run.times.push(time);
    for (const name in values) {
      if (!run.columns.has(name)) run.columns.set(name, []);
      run.columns.get(name).push([step, values[name]]);
    }
  }
  run.corrupt += answer.corrupt.length;
  Object.assign(run, { next: answer.next, file: answer.file, charts: answer.charts });
  return answer.rows.length > 0 || answer.restart;
}

const known = (name) => (run.columns.get(name) || []).filter(([, v]) => v !== null);

// Charts.

function ticksOf(low, high, count = 4) {
  if (high - low <= 1e-9 * Math.abs(high)) [low, high] = low ? [low - Math.abs(low) / 2, high + Math.abs(high) / 2] : [0, 1];
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s * count >= (high - low) * 0.999);
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i++) ticks.push(i * step);
  return ticks;
}

function linearAxis(values, label) {
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const ticks = ticksOf(low > 0 && low < high / 2 ? 0 : low, high);
  const factor = label === percent ? 100 : 1, most = factor * Math.max(...ticks.map(Math.abs));
  if (most < 1e-2 || most >= 1e5) return [ticks, ticks.map(label)];
  const decimals = Math.max(0, -Math.floor(Math.log10(factor * (ticks[1] - ticks[0])) + 1e-9));
  return [ticks, ticks.map((t) => (factor * t).toFixed(decimals).replace("-", "−") + (factor > 1 ? "%" : ""))];
}

function logAxis(values) {
  const positive = values.filter((v) => v > 0).map(Math.log10);
  const low = Math.floor(positive.reduce((a, b) => Math.min(a, b)));
  const high = Math.max(Math.ceil(positive.reduce((a, b) => Math.max(a, b))), low + 1);
  const stride = Math.ceil((high - low) / 4), ticks = [];
  for (let t = low; t < high + stride; t += stride) ticks.push(t);
  const zero = positive.length < values.length ? [low - (ticks[ticks.length - 1] - low) / 7] : [];
  return [[...zero, ...ticks], [...zero.map(() => "0"), ...ticks.map(powerOfTen)]];
}

function runningMean(points, half) {
  const sums = [[0, 0]]; // of the values before each point, and their count
  for (const [, v] of points) {
    const [sum, count] = sums[sums.length - 1];
    sums.push(v === null ? [sum, count] : [sum + v, count + 1]);
  }
  return points.map(([step, v], i) => {
    const from = sums[Math.max(0, i - half)], to = sums[Math.min(points.length, i + half + 1)];
    return [step, v === null ? null : (to[0] - from[0]) / (to[1] - from[1])];
  });
}

function thinned(points) {
  const stride = Math.ceil(points.length / MOST_POINTS);
  return points.filter((_, i) => i % stride === 0 || i === points.length - 1);
}

const frame = { width: 480, height: 236, left: 54, right: 392, top: 10, bottom: 210 };

function axes(box, ticks, texts, y, x, steps) {
  const lines = ticks.map((tick, i) => {
    const at = y(tick).toFixed(1);
    return `<line class="grid" x1="${box.left}" x2="${box.right}" y1="${at}" y2="${at}"/>` +
      `<text x="${box.left - 8}" y="${Number(at) + 4}" text-anchor="end">${texts[i]}</text>`;
  });
  const whole = ticksOf(steps[0], steps[1], 5).filter((t) => Number.isInteger(t) && t >= steps[0] && t <= steps[1]);
  for (const step of whole.length ? whole : [steps[0]]) {
    lines.push(`<text x="${x(step).toFixed(1)}" y="${box.height - 6}" text-anchor="middle">${step.toLocaleString("en")}</text>`);
  }
  return lines.join("");
}

function drawing(points, x, y) {
  let path = "", gap = true;
  for (const [step, v] of points) {
    if (v !== null) path += `${gap ? "M" : "L"}${x(step).toFixed(1)} ${y(v).toFixed(1)}h0`;
    gap = v === null;
  }
  return path;
}

function chart(plan, steps) {
  const names = Object.keys(plan.lines), label = LABELS[plan.label];
  const values = names.flatMap((name) => known(plan.lines[name]).map(([, v]) => v));
  if (!values.length) return "";
  const legend = names.length > 4, box = { ...frame, right: legend ? 470 : frame.right };
  const high = values.reduce((a, b) => Math.max(a, b)), low = values.reduce((a, b) => Math.min(a, b));
  const log = plan.log && low >= 0 && high > 0;
  const [ticks, texts] = log ? logAxis(values) : linearAxis(values, label);
  const span = ticks[ticks.length - 1] - ticks[0];
  const x = (step) => box.left + (box.right - box.left) * (steps[1] > steps[0] ? (step - steps[0]) / (steps[1] - steps[0]) : 0.5);
  const place = (tick) => box.bottom - ((box.bottom - box.top) * (tick - ticks[0])) / span;
  const y = (v) => place(!log ? v : v > 0 ? Math.log10(v) : ticks[0]);

  const parts = [axes(box, ticks, texts, place, x, steps)], ends = [];
  let note = "";
  names.forEach((name, color) => {
    let line = run.columns.get(plan.lines[name]) || [];
    const count = known(plan.lines[name]).length;
    if (!count) return;
    if (plan.smooth && count >= 40) {
      const half = Math.max(2, Math.floor(count / 50));
      note = `thick line: mean of ${2 * half + 1} steps`;
      parts.push(`<path class="thin s${color % COLORS}" d="${drawing(thinned(line), x, y)}"/>`);
      line = runningMean(line, half);
    }
    const shown = thinned(line);
    if (!log) parts.push(`<path class="s${color % COLORS}" d="${drawing(shown, x, y)}"/>`);
    if (log || count <= 24) {
      const dots = shown.filter(([, v]) => v !== null);
      parts.push(...dots.map(([s, v]) => `<circle class="n${color % COLORS}" cx="${x(s).toFixed(1)}" cy="${y(v).toFixed(1)}" r="${count < 300 ? 2.4 : 1.2}"/>`));
    }
    const last = line.findLast(([, v]) => v !== null)[1];
    ends.push({ at: y(last), color: color % COLORS, name, text: label(last) });
  });
  if (!legend) {
    parts.push(`<text x="${box.right + 26}" y="${box.height - 6}">step</text>`);
    let at = box.top - 32;
    [...ends].sort((a, b) => a.at - b.at).forEach((end, i) => {
      const room = box.bottom - 18 - 32 * (ends.length - 1 - i);
      at = Math.max(at + 32, Math.min(Math.max(end.at, box.top + 4), room));
      parts.push(`<text class="end n${end.color}" x="${box.right + 9}" y="${at + 2}">${esc(end.name)}</text>`);
      parts.push(`<text x="${box.right + 9}" y="${at + 16}">${end.text}</text>`);
    });
  }
  parts.push(readings(plan, steps, box, x, label));
  const entries = ends.map((end) => legendEntry(`<path class="s${end.color}" d="M1 5h16"/>`, end.name, end.text));
  return figure(plan.title, note, legend ? entries : [], parts.join(""), box);
}

// Invisible columns whose <title> is the browser's own tooltip.
function readings(plan, steps, box, x, label) {
  const said = new Map();
  for (const [name, metric] of Object.entries(plan.lines)) {
    for (const [step, v] of thinned(run.columns.get(metric) || [])) {
      if (!said.has(step)) said.set(step, [`step ${step}`]);
      said.get(step).push(`${name} ${v === null ? "not finite" : label(v)}`);
    }
  }
  const all = [...said.keys()].sort((a, b) => a - b), stride = Math.max(1, Math.floor(all.length / 150));
  const shown = all.filter((_, i) => i % stride === 0);
  const edge = (i) => (i === 0 ? box.left : i === shown.length ? box.right : (x(shown[i - 1]) + x(shown[i])) / 2);
  return shown.map((step, i) => `<rect class="hit" x="${edge(i).toFixed(1)}" y="${box.top}" width="${(edge(i + 1) - edge(i)).toFixed(1)}"` +
    ` height="${box.bottom - box.top}"><title>${esc(said.get(step).join("\n"))}</title></rect>`).join("");
}

const legendEntry = (mark, name, text) =>
  `<span><svg viewBox="0 0 18 10" aria-hidden="true">${mark}</svg>${esc(name)} <small>${text}</small></span>`;

function figure(title, note, entries, inside, box) {
  const legend = entries.length ? `<p class="legend">${entries.join("")}</p>` : "";
  return `<figure><figcaption><b>${esc(title)}</b><small>${note}</small></figcaption>${legend}` +
    `<svg viewBox="0 0 ${box.width} ${box.height}" role="img" aria-label="${esc(title)} by step">${inside}</svg></figure>`;
}

// Seconds of each phase, stacked: a column a step, or the mean of neighbouring steps where they are many.
function timings(steps) {
  const phases = [...run.columns.keys()].filter((name) => /^timing\/.+_s$/.test(name) && name !== "timing/step_s");
  const usual = ["rollout", "reward", "advantage", "update", "sync", "validation"].map((name) => `timing/${name}_s`);
  phases.sort((a, b) => (usual.indexOf(a) + 1 || 99) - (usual.indexOf(b) + 1 || 99) || (a < b ? -1 : 1));
  if (!phases.length) return "";
  const box = { width: 960, height: 236, left: 54, right: 950, top: 10, bottom: 210 };
  const columns = Math.min(120, steps[1] - steps[0] + 1), perColumn = (steps[1] - steps[0] + 1) / columns;
  const column = (step) => Math.floor((step - steps[0]) / perColumn);
  const counts = Array(columns).fill(0), sums = phases.map(() => Array(columns).fill(0));
  for (const step of run.steps) counts[column(step)]++;
  phases.forEach((name, p) => known(name).forEach(([step, v]) => { sums[p][column(step)] += v; }));
  const mean = (p, c) => (counts[c] ? sums[p][c] / counts[c] : 0);
  const heights = counts.map((_, c) => phases.reduce((sum, _name, p) => sum + mean(p, c), 0));
  const [ticks, texts] = linearAxis([0, Math.max(...heights, 1e-9)], number);
  const y = (v) => box.bottom - ((box.bottom - box.top) * v) / ticks[ticks.length - 1];
  const width = (box.right - box.left) / columns;
  const x = (step) => box.left + (column(step) + 0.5) * width;
  const parts = [axes(box, ticks, texts, y, x, steps)];
  for (let c = 0; c < columns; c++) {
    let base = 0;
    phases.forEach((_, p) => {
      const top = base + mean(p, c);
      parts.push(`<rect class="stack" style="fill:var(--p${p % 6})" x="${(box.left + c * width).toFixed(1)}" width="${Math.max(1, width - 1).toFixed(1)}"` +
        ` y="${y(top).toFixed(1)}" height="${(y(base) - y(top)).toFixed(1)}"/>`);
      base = top;
    });
  }
  const steady = run.steps.length || 1;
  const entries = phases.map((name, p) => {
    const average = known(name).reduce((sum, [, v]) => sum + v, 0) / steady;
    return legendEntry(`<rect style="fill:var(--p${p % 6})" width="18" height="10"/>`, name.slice(7, -2).replaceAll("_", " "), seconds(average));
  });
  return figure("Seconds a step", "phases that overlap add up to more than the step", entries, parts.join(""), box);
}

// The head of the page.

function showState(answer) {
  const total = answer.total_steps, n = run.steps.length;
  const step = n ? run.steps[n - 1] : 0, ended = answer.finished && total !== null && step >= total;
  const paces = [];
  for (let i = Math.max(1, n - 20); i < n; i++) {
    if (run.steps[i] > run.steps[i - 1]) paces.push((run.times[i] - run.times[i - 1]) / (run.steps[i] - run.steps[i - 1]));
  }
  const pace = paces.sort((a, b) => a - b)[Math.floor(paces.length / 2)]; // the median: a pause or a validation is no pace
  const age = n ? Math.max(0, answer.now - run.times[n - 1]) : 0;
  const parts = [n ? `<b>step ${step.toLocaleString("en")}${total === null ? "" : ` of ${total.toLocaleString("en")}`}</b>` : "waiting for the first step"];
  if (ended) parts.push("finished");
  else if (pace !== undefined) {
    parts.push(`${seconds(pace)} a step`);
    if (total !== null && step < total && age < 10 * pace) parts.push(`${seconds(Math.max(0, pace * (total - step) - age))} left`);
  }
  if (n && !ended) parts.push(`last row ${seconds(age)} ago`);
  byId("state").innerHTML = parts.join(", ");
  const share = total ? Math.min(100, (100 * step) / total) : 0;
  byId("progress").firstElementChild.style.width = `${share}%`;
  byId("progress").setAttribute("aria-valuenow", share.toFixed(0));
  byId("notice").textContent = run.corrupt ? `${run.corrupt} line(s) of metrics.jsonl cannot be read` : "";
}

function results() {
  const wanted = [["Reward", "reward/mean", number], ["Validation reward", "validation/reward", number], ["Images per second", "throughput/images_per_s", number]];
  const exact = [...run.columns.keys()].find((name) => /^validation\/(?!held_out).+\/exact_match$/.test(name));
  if (exact) wanted.splice(2, 0, ["Validation exact match", exact, percent]);
  return wanted.map(([title, metric, label]) => {
    const points = known(metric);
    if (!points.length) return "";
    const first = points[0][1], last = points[points.length - 1][1];
    const shown = points.length > 1 && !metric.startsWith("throughput") ? `${label(first)}<i>→</i><b>${label(last)}</b>` : `<b>${label(last)}</b>`;
    return `<div><dt>${title}</dt><dd>${shown}</dd></div>`;
  }).join("");
}

function fill(id, html) {
  const place = byId(id), section = place.closest("section");
  place.innerHTML = html;
  if (section) section.hidden = !html;
}

function draw() {
  const steps = [run.steps.reduce((a, b) => Math.min(a, b), run.steps[0] || 0), run.steps.reduce((a, b) => Math.max(a, b), 0)];
  fill("results", results());
  fill("charts", run.charts.map((plan) => chart(plan, steps)).join(""));
  fill("timings", timings(steps));
}

// Samples.

function media({ url, moment, note }, alt) {
  const text = esc(`${alt}, ${moment}`);
  const view = /\.mp4\?/.test(url)
    ? `<video src="${esc(url)}" aria-label="${text}" controls loop muted playsinline preload="metadata"></video>`
    : `<a href="${esc(url)}"><img src="${esc(url)}" alt="${text}"></a>`;
  return `<figure>${view}<figcaption>${esc(moment)}${note ? `<small>${esc(note)}</small>` : ""}</figcaption></figure>`;
}

let listed = "";
function showSamples(text) {
  if (text === listed) return; // a video that plays goes on
  listed = text;
  const { grids, prompts } = JSON.parse(text);
  fill("grids", grids.slice(0, 3).map((grid) => media(grid, "samples")).join(""));
  fill("prompts", prompts.map(({ prompt, samples }) =>
    `<h3>${esc(prompt)}</h3><div class="strip">${samples.map((sample) => media(sample, prompt)).join("")}</div>`).join(""));
}

// Polling. Addresses are relative, so that the page works behind a proxy's path.

async function ask(address) {
  const reply = await fetch(address, { cache: "no-store" });
  if (!reply.ok) throw new Error(`${address}: ${reply.status}`);
  return reply.text();
}

async function pollRows() {
  let wait = ROWS_EVERY, changed = false;
  try {
    for (let more = true; more; ) {
      const answer = JSON.parse(await ask(`metrics?from=${run.next}&file=${encodeURIComponent(run.file)}`));
      changed = take(answer) || changed;
      more = answer.more;
      if (!more) showState(answer);
    }
  } catch (error) {
    byId("notice").textContent = `no answer since ${new Date().toLocaleTimeString()}: training has ended, or the tunnel has (${error.message})`;
    wait = 2 * ROWS_EVERY;
  }
  if (changed) draw();
  setTimeout(pollRows, wait);
}

async function pollSamples() {
  try {
    showSamples(await ask("samples"));
  } catch {
    // pollRows says so
  }
  setTimeout(pollSamples, SAMPLES_EVERY);
}

// Few pixels are shown as they are; the event does not bubble, so it is caught on its way down.
byId("prompts").addEventListener("load", ({ target }) => target.classList.toggle("small", target.naturalWidth < 128), true);
byId("prompts").addEventListener("mouseover", (event) => event.target.matches("video") && event.target.play());
pollRows();
pollSamples();
