// Keyboard, copy buttons, charts and the facts of a token. No state is kept here.
"use strict";

const one = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];

function step(by) {
  const items = all("a.row, .chat .step");
  if (!items.length) return;
  const now = items.findIndex((item) => item === document.activeElement || item.contains(document.activeElement));
  const next = items[Math.min(Math.max(now + by, 0), items.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

function token(by) {
  const items = all("#tokens .t");
  if (!items.length) return;
  const now = items.findIndex((item) => item.classList.contains("on"));
  show(items[Math.min(Math.max(now + by, 0), items.length - 1)]);
}

function show(item) {
  all("#tokens .on").forEach((other) => other.classList.remove("on"));
  item.classList.add("on");
  one("#token-facts").textContent = item.title;
}

function follow(selector) {
  const link = one(selector);
  if (link) link.click();
}

function mark() {  // the row, the step or the trajectory that has the focus; never a whole list
  const row = document.activeElement.closest("a.row[data-trajectory]"), dialog = one("#mark-row");
  if (row && dialog) {
    const { run, trajectory } = row.dataset;
    const next = location.pathname + location.search + "#" + encodeURIComponent(row.id);
    for (const [name, value] of Object.entries({ run, trajectory, next })) dialog.querySelector(`[name=${name}]`).value = value;
    one("#mark-row-title").textContent = trajectory;
    dialog.showModal();
    dialog.querySelector("select").focus();
    return;
  }
  const details = (document.activeElement.closest(".step") || document).querySelector("details.mark");
  if (!details || details.querySelector("[name=count]")) return;
  details.open = true;
  details.querySelector("select").focus();
}

function close(details) {
  if (!details) return;
  details.open = false;
  details.querySelector("summary").focus();
}

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  "/": () => { const field = one("#search"); if (field) field.focus(); else location.assign("/trajectories"); },
  t: () => { const at = document.activeElement.closest(".step") || one(".step"); if (at) at.querySelector("a.tokens").click(); },
  m: mark,
  g: () => follow("a[data-group]"),
  u: () => follow("a[data-up]"),
  o: () => location.assign("/operations"),
  "?": () => one("#keys") && one("#keys").showModal(),
  ArrowRight: () => token(1),
  ArrowLeft: () => token(-1),
};

document.addEventListener("keydown", (event) => {
  const form = event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.closest("textarea") && event.target.form;
  if (form) form.requestSubmit();
  if (event.key === "Escape") close(event.target.closest("details.mark[open]"));
  const typing = event.target.closest("input, select, textarea, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  if (event.key.startsWith("Arrow") && !one("#tokens")) return;
  event.preventDefault();
  KEYS[event.key]();
});

async function copy(button) {
  const text = document.getElementById(button.dataset.copy).textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // not a secure context: by way of a selection
    const field = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const name = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = name; }, 1200);
}

function insert(field, text) {
  field.focus();
  field.setRangeText(text, field.selectionStart, field.selectionEnd, "end");
}

document.addEventListener("click", (event) => {
  const row = event.target.closest("a.row");
  if (row) history.replaceState({ ...history.state, row: row.id }, "");
  const button = event.target.closest("button[data-copy]");
  if (button) copy(button);
  if (event.target.closest("button[data-keys]")) KEYS["?"]();
  if (event.target.closest("#cancel")) htmx.trigger("#query", "htmx:abort");
  const name = event.target.closest("button[data-insert]");
  if (name) insert(one("#search"), name.dataset.insert);
  const target = event.target.closest("#tokens .t");
  if (target) show(target);
});
document.addEventListener("mouseover", (event) => {
  const target = event.target.closest("#tokens .t");
  if (target) one("#token-facts").textContent = target.title;
});

// Times of an axis in UTC, 24 hours: see "values" of an axis in uPlot's documentation.
const DAY = "\n{YYYY}-{MM}-{DD}";
const TIMES = [
  [86400 * 365, "{YYYY}", null, null, null, null, null, null, 1],
  [86400, "{MM}-{DD}", "\n{YYYY}", null, null, null, null, null, 1],
  [60, "{HH}:{mm}", DAY, null, DAY, null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", DAY, null, DAY, null, null, null, 1],
];

const utc = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ");
const shown = (value) => (value == null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: 4 }));

// span: [from, to] of a chart over time that shows just that
function chart(place, time, x, lines, sync, span) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const grid = { stroke: colour("--line"), width: 1 };
  const ticks = { stroke: colour("--dim"), grid, ticks: { show: false }, font: "11px system-ui" };
  const colours = ["--accent", "--warn", "--good", "--bad", "--dim"].map(colour);
  const names = Object.keys(lines);
  const line = (label, i) => ({ label, stroke: colours[i % colours.length], dash: i < colours.length ? [] : [5, 3], width: 1.5, points: { show: x.length < (span ? 40 : 100), size: 4 } });
  const at = (value) => (value == null ? "–" : time ? utc(value) : shown(value));
  const say = (plot) => {  // the value under the cursor, above a chart of one line
    const facts = place.parentElement.querySelector("figcaption output");
    const i = plot.cursor.idx;
    if (facts && names.length === 1) facts.textContent = i == null ? "" : `${at(x[i])}: ${shown(lines[names[0]][i])}`;
  };
  return new uPlot({
    width: place.clientWidth, height: 168, legend: { show: !!span || names.length > 1 },
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    cursor: { sync: sync && { key: sync.key }, y: false },
    scales: { x: span ? { time, range: () => span } : { time } },
    hooks: { setCursor: [say] },
    axes: [time ? { ...ticks, values: TIMES, size: 44 } : { ...ticks, size: 28 }, { ...ticks, size: 52 }],
    series: [{ label: time ? "UTC" : "x", value: (_, value) => at(value) }, ...names.map(line)],
  }, [x, ...names.map((name) => lines[name])], place);
}

function resized(made) {
  addEventListener("resize", () => { for (const [place, plot] of made) plot.setSize({ width: place.clientWidth, height: 168 }); });
}

async function charts() {
  const box = one("[data-series]");
  if (!box) return;
  const series = await (await fetch(box.dataset.series)).json();
  const sync = uPlot.sync("run");
  resized(all(".plot").map((place) => {
    const name = place.dataset.name;
    const plot = chart(place, box.dataset.axis === "time", series.x, { [name]: series[name] }, sync);
    if (box.dataset.list) place.addEventListener("click", () => { if (plot.cursor.idx != null) location.assign(box.dataset.list + series.x[plot.cursor.idx]); });
    return [place, plot];
  }));
}

async function operations() {  // the charts of the operations page
  const box = one("[data-operations]");
  if (!box) return;
  const made = new Map(), span = [0, 0], sync = uPlot.sync("operations");
  resized(made);
  const draw = async () => {
    const reply = await fetch(box.dataset.operations);
    if (!reply.ok) return;
    const found = await reply.json();
    [span[0], span[1]] = [found.from, found.to];
    if (one("#permalink")) one("#permalink").href = found.permalink;
    for (const place of all("[data-operations] .plot")) {
      const { x, series } = found.charts[place.dataset.name];
      const names = Object.keys(series), plot = made.get(place);
      if (plot && String(plot.series.slice(1).map((line) => line.label)) === String(names)) {
        plot.setData([x, ...names.map((name) => series[name])]);
        continue;
      }
      if (plot) plot.destroy();
      made.delete(place);
      place.textContent = names.length ? "" : "Nothing in this time.";
      place.classList.toggle("dim", !names.length);
      if (names.length) made.set(place, chart(place, true, x, series, sync, span));
    }
  };
  await draw();
  if ("live" in box.dataset) setInterval(() => { if (!document.hidden) draw(); }, 10000);
}

function result() {
  const place = one("[data-chart]:empty");
  if (!place) return;
  const { time, x, series } = JSON.parse(place.dataset.chart);
  resized([[place, chart(place, time, x, series)]]);
}

function arrive() {  // the focus is where the address, or the way back, leads
  const id = decodeURIComponent(location.hash.slice(1)) || (history.state && history.state.row) || "";
  const target = id && document.getElementById(id);
  if (target) target.focus({ preventScroll: !location.hash });
  const step = !target && one(".chat") && id.match(/^step-(\d+)$/);  // of another page
  if (step && !new URLSearchParams(location.search).has("first")) location.replace(`?first=${step[1]}#${id}`);
}

document.addEventListener("htmx:beforeRequest", (event) => {  // a form that is filled in stays
  if (event.detail.target.id === "main" && one("details.mark[open]")) event.preventDefault();
});

arrive();
charts();
operations();
result();
document.addEventListener("htmx:afterSettle", result);
