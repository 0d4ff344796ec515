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

function mark(details) {
  if (!details) return;
  details.open = true;
  details.querySelector("select").focus();
}

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  "/": () => { const field = one("#search"); if (field) field.focus(); else location.assign("/trajectories"); },
  t: () => { const at = document.activeElement.closest(".step") || one(".step"); if (at) at.querySelector("a.tokens").click(); },
  m: () => { const at = document.activeElement.closest(".step") || document; mark(at.querySelector("details.mark")); },
  g: () => follow("a[data-group]"),
  u: () => follow("a[data-up]"),
  "?": () => one("#keys") && one("#keys").showModal(),
  ArrowRight: () => token(1),
  ArrowLeft: () => token(-1),
};

document.addEventListener("keydown", (event) => {
  const form = event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.closest("textarea") && event.target.form;
  if (form) form.requestSubmit();
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

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-copy]");
  if (button) copy(button);
  if (event.target.closest("button[data-keys]")) KEYS["?"]();
  const target = event.target.closest("#tokens .t");
  if (target) show(target);
});
document.addEventListener("mouseover", (event) => {
  const target = event.target.closest("#tokens .t");
  if (target) one("#token-facts").textContent = target.title;
});

function chart(place, time, x, lines, sync) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const grid = { stroke: colour("--line"), width: 1 };
  const ticks = { stroke: colour("--dim"), grid, ticks: { show: false }, font: "11px system-ui" };
  const colours = ["--accent", "--warn", "--good", "--bad", "--dim"].map(colour);
  const names = Object.keys(lines);
  const line = (label, i) => ({ label, stroke: colours[i % colours.length], width: 1.5, points: { show: x.length < 100, size: 4 } });
  return new uPlot({
    width: place.clientWidth, height: 168, legend: { show: names.length > 1 },
    cursor: { sync: sync && { key: sync.key }, y: false },
    scales: { x: { time } },
    axes: [ticks, { ...ticks, size: 52 }],
    series: [{}, ...names.map(line)],
  }, [x, ...names.map((name) => lines[name])], place);
}

function resized(made) {
  addEventListener("resize", () => made.forEach(([place, plot]) => plot.setSize({ width: place.clientWidth, height: 168 })));
}

async function charts() {
  const box = one("[data-series]");
  if (!box) return;
  const series = await (await fetch(box.dataset.series)).json();
  const sync = uPlot.sync("run");
  resized(all(".plot").map((place) => {
    const name = place.dataset.name;
    return [place, chart(place, box.dataset.axis === "time", series.x, { [name]: series[name] }, sync)];
  }));
}

function result() {
  const place = one("[data-chart]:empty");
  if (!place) return;
  const { time, x, series } = JSON.parse(place.dataset.chart);
  resized([[place, chart(place, time, x, series)]]);
}

document.addEventListener("htmx:beforeRequest", (event) => {  // a form that is filled in stays
  if (event.detail.target.id === "main" && one("details.mark[open]")) event.preventDefault();
});

charts();
result();
document.addEventListener("htmx:afterSettle", result);
