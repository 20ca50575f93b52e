/* The interactive section of a sweep's report: controls, four charts, a table. Draws what
   page_model.js computes; native inputs, so that keyboard and screen readers work as usual. Of the
   whole page: what is under the pointer, said at once, and every table as CSV. */
const SVG = "http://www.w3.org/2000/svg";
const BOX = { left: 46, right: 408, top: 10, bottom: 262 };

function byId(id) { return document.getElementById(id); }

/** An SVG element with attributes, added to a parent. */
function draw(parent, kind, attributes, text) {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
}

/** About five round numbers from 0 to `most`. */
function ticks(most) {
  const rough = most / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

/** An empty chart: axes, names, and functions from data to pixels. */
function frame(id, x, y) {
  const svg = byId(id), { left, right, top, bottom } = BOX;
  svg.replaceChildren();
  const place = (axis, value) => (axis.log ? Math.log2(value / axis.least) / Math.log2(axis.most / axis.least || 2) : value / axis.most);
  const toX = (value) => left + (right - left) * place(x, value);
  const toY = (value) => bottom - (bottom - top) * place(y, value);
  for (const value of x.ticks ?? ticks(x.most)) {
    draw(svg, "line", { x1: toX(value), x2: toX(value), y1: top, y2: bottom, class: "grid" });
    draw(svg, "text", { x: toX(value), y: bottom + 15, "text-anchor": "middle" }, String(+value.toPrecision(4)));
  }
  for (const value of ticks(y.most)) {
    draw(svg, "line", { x1: left, x2: right, y1: toY(value), y2: toY(value), class: "grid" });
    draw(svg, "text", { x: left - 5, y: toY(value) + 4, "text-anchor": "end" }, String(+value.toPrecision(4)));
  }
  draw(svg, "line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" });
  draw(svg, "line", { x1: left, x2: left, y1: top, y2: bottom, class: "axis" });
  draw(svg, "text", { x: (left + right) / 2, y: bottom + 32, "text-anchor": "middle" }, x.name);
  draw(svg, "text", { x: 12, y: (top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(top + bottom) / 2})` }, y.name);
  return { svg, toX, toY };
}

/** The colour of a policy or arm; the grey of plain decoding follows the theme. */
function colourOf(each) { return each.colour === "#6b7580" ? "var(--grey)" : each.colour; }

/** A spot of the colour of a policy or arm, for legends. */
function swatch(each) {
  const spot = document.createElement("span");
  spot.className = "swatch";
  spot.style.background = colourOf(each);
  return spot;
}

/** A policy's curve: points [x, y, missed, text], dotted where the model misses what was measured. */
function polyline(chart, points, each, chosen) {
  const runs = [];
  points.forEach((point, i) => {
    if (i && point[2] === points[i - 1][2]) runs.at(-1).push(point);
    else runs.push(i ? [points[i - 1], point] : [point]);
  });
  for (const run of runs) {
    const missed = run.at(-1)[2];
    draw(chart.svg, "polyline", {
      points: run.map(([a, b]) => `${chart.toX(a).toFixed(2)},${chart.toY(b).toFixed(2)}`).join(" "),
      fill: "none", stroke: colourOf(each), "stroke-width": chosen ? 3 : 1.3, "stroke-opacity": missed ? 0.45 : chosen ? 1 : 0.75,
      "stroke-linejoin": "round", "data-policy": each.name, ...(missed ? { "stroke-dasharray": "1 5", "stroke-linecap": "round", class: "missed" } : {}),
    });
  }
  for (const [a, b, , text] of points) {
    draw(chart.svg, "circle", { cx: chart.toX(a), cy: chart.toY(b), r: 6, fill: "transparent", "data-tip": text });
  }
}

/** A measured point with its intervals; null bounds draw no bar. */
function dot(chart, x, y, each, faint, text) {
  const style = { stroke: colourOf(each), "stroke-width": 1.2, "stroke-opacity": faint ? 0.75 : 1 };
  if (y.low !== null && y.high !== null && y.low !== undefined) {
    draw(chart.svg, "line", { x1: chart.toX(x.mid), x2: chart.toX(x.mid), y1: chart.toY(y.low), y2: chart.toY(y.high), ...style });
  }
  if (x.low !== null && x.high !== null && x.low !== undefined) {
    draw(chart.svg, "line", { x1: chart.toX(x.low), x2: chart.toX(x.high), y1: chart.toY(y.mid), y2: chart.toY(y.mid), ...style });
  }
  draw(chart.svg, "circle", {
    cx: chart.toX(x.mid), cy: chart.toY(y.mid), r: 3.6, fill: faint ? "transparent" : colourOf(each), "data-arm": each.arm, "data-tip": text, ...style,
  });
}

function userCount(count) { return `${count} user${count > 1 ? "s" : ""}`; }

function ring(chart, x, y, each) {
  draw(chart.svg, "circle", { cx: chart.toX(x), cy: chart.toY(y), r: 7, fill: "none", stroke: "var(--ink)", "stroke-width": 2, class: "ring" });
  draw(chart.svg, "circle", { cx: chart.toX(x), cy: chart.toY(y), r: 3.5, fill: colourOf(each) });
}

function startPage(data) {
  const model = data.model;
  const number = (id) => Number(byId(id).value);
  const chosenOf = (name) => document.querySelector(`input[name=${name}]:checked`).value;

  function radios(id, name, entries, first) {
    for (const { value, label, colour } of entries) {
      const wrap = document.createElement("label"), input = document.createElement("input");
      Object.assign(input, { type: "radio", name, value, checked: value === first });
      wrap.append(input);
      if (colour) wrap.append(swatch({ colour }));
      wrap.append(label);
      byId(id).append(wrap);
    }
  }

  function controls() {
    return { workload: chosenOf("workload"), policy: chosenOf("policy"), requests: number("requests"), length: number("length"), threshold: number("threshold"), spread: number("spread") };
  }

  /** Outcomes at all levels, kept under what they depend on: moving one slider redoes one curve. */
  function curve(choice, policy) {
    const own = { fixed: choice.length, static: choice.threshold }[policy] ?? "";
    return kept(`curve ${policy} ${own} ${choice.workload} ${choice.spread}`, () =>
      data.levels.map((requests) => ({ requests, ...outcome(model, { ...choice, policy, requests }) })));
  }

  /** The model's error at the measured load next to this one, null where the policy has none. */
  function errorOf(policy, requests) {
    const far = (users) => Math.abs(Math.log2(users / requests));
    const users = Object.keys(data.errors[policy] ?? {}).map(Number).sort((a, b) => far(a) - far(b))[0];
    return users === undefined ? null : { users, error: data.errors[policy][users] };
  }

  function misses(policy, requests) { return Math.abs(errorOf(policy, requests)?.error ?? 0) > data.missed; }

  function charts(choice, now) {
    const curves = data.policies.map((policy) => ({ policy, line: curve(choice, policy.name) }));
    const all = [...curves.flatMap((each) => each.line), now];
    const seen = data.measured.flatMap((arm) => arm.points);
    const topOf = (values) => 1.06 * Math.max(...values);
    const mostTokens = topOf([...all.map((o) => o.tokens_per_s), ...seen.map((p) => p.tokens_per_s.high ?? p.tokens_per_s.mid)]);
    const plainLine = new Map(curve(choice, "plain").map((o) => [o.requests, o.tokens_per_s]));
    plainLine.set(choice.requests, outcome(model, { ...choice, policy: "plain" }).tokens_per_s);
    const overPlain = (o) => o.tokens_per_s / plainLine.get(o.requests);
    const plainSeen = new Map((data.measured.find((arm) => arm.policy === "plain")?.points ?? []).map((p) => [p.requests, p.tokens_per_s.mid]));
    const seenRatio = (p) => (plainSeen.has(p.requests) ? { mid: p.tokens_per_s.mid / plainSeen.get(p.requests) } : null);
    const mostRatio = topOf([1, ...all.map(overPlain), ...seen.map((p) => seenRatio(p)?.mid ?? 0)]);
    const mostSpeed = topOf([...all.map((o) => o.speed), ...seen.map((p) => p.speed?.high ?? p.speed?.mid ?? 0)]);
    const users = { name: "users at a time", log: true, least: 1, most: Math.max(2, model.most), ticks: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].filter((n) => n <= Math.max(2, model.most)) };
    const tokens = { name: "tokens/s of all users", most: mostTokens };
    const faint = choice.workload !== "mix";
    const four = [
      [frame("chart-frontier", { name: "tokens/s/user", most: mostSpeed }, tokens), (o) => o.speed, (o) => o.tokens_per_s, (p) => p.speed, (p) => p.tokens_per_s, "tokens/s"],
      [frame("chart-throughput", users, tokens), (o) => o.requests, (o) => o.tokens_per_s, (p) => ({ mid: p.requests }), (p) => p.tokens_per_s, "tokens/s"],
      [frame("chart-ratio", users, { name: "tokens/s over plain decoding", most: mostRatio }), (o) => o.requests, overPlain, (p) => ({ mid: p.requests }), seenRatio, "of plain"],
      [frame("chart-length", users, { name: "drafts verified a step and request", most: 1.06 * model.gamma }), (o) => o.requests, (o) => o.drafts, (p) => ({ mid: p.requests }), (p) => (p.drafts === null ? null : { mid: p.drafts }), "drafts"],
    ];
    const last = (name) => name === choice.policy;
    const ordered = [...curves].sort((a, b) => last(a.policy.name) - last(b.policy.name));
    for (const [chart, x, y, seenX, seenY, unit] of four) {
      for (const { policy, line } of ordered) {
        polyline(chart, line.map((o) => [x(o), y(o), misses(policy.name, o.requests), `${policy.label}, ${userCount(o.requests)}, model: ${y(o).toPrecision(3)} ${unit}`]), policy, last(policy.name));
      }
      for (const arm of data.measured) {
        for (const point of arm.points) {
          if (seenX(point) && seenY(point)) dot(chart, seenX(point), seenY(point), arm, faint, `${arm.arm}, ${userCount(point.requests)}, measured: ${seenY(point).mid.toPrecision(3)} ${unit}`);
        }
      }
      ring(chart, x(now), y(now), data.policies.find((policy) => last(policy.name)));
    }
  }

  function table(choice) {
    const rows = data.policies.map((policy) => ({ policy, found: outcome(model, { ...choice, policy: policy.name }) }));
    const plain = rows.find((row) => row.policy.name === "plain").found.tokens_per_s;
    byId("policy-table").tBodies[0].replaceChildren(...rows.map(({ policy, found }) => {
      const row = document.createElement("tr");
      row.dataset.policy = policy.name;
      row.className = policy.name === choice.policy ? "chosen" : "";
      const cells = [policy.label, found.tokens_per_s.toFixed(1), found.speed.toFixed(1), (found.tokens_per_s / plain).toFixed(2) + "x", found.tau.toFixed(2), found.drafts.toFixed(2), (1e3 * found.seconds).toFixed(1), Math.round(100 * found.skipped) + "%"];
      row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
      return row;
    }));
    return plain;
  }

  /** Where the chosen policy's curve is dotted: by how much the model is off. */
  function warning({ policy, requests }) {
    if (!misses(policy, requests)) return "";
    const { users, error } = errorOf(policy, requests);
    return ` Do not trust it: at ${userCount(users)} the model is ${Math.round(100 * Math.abs(error))}% ${error > 0 ? "above" : "below"} what was measured.`;
  }

  function update() {
    const choice = controls();
    byId("requests-value").textContent = userCount(choice.requests);
    byId("length-value").textContent = `${choice.length} of ${model.gamma}`;
    byId("threshold-value").textContent = choice.threshold.toFixed(2);
    byId("spread-value").textContent = choice.spread.toFixed(2) + (choice.spread === model.spread ? ` (${data.spread_told})` : "");
    const now = { requests: choice.requests, ...outcome(model, choice) };
    const plain = table(choice), policy = data.policies.find((each) => each.name === choice.policy);
    const ratio = now.tokens_per_s / plain;
    const against = choice.policy === "plain" ? "" : `, ${ratio.toFixed(2)}x plain decoding`;
    const prompts = choice.workload === "mix" ? "the mix of this run" : `${choice.workload} prompts`;
    byId("readout").textContent = `${policy.label} with ${userCount(choice.requests)} on ${prompts}: ${now.tokens_per_s.toFixed(1)} tokens/s in all, ${now.speed.toFixed(1)} for each while it is answered${against}. It verifies ${now.drafts.toFixed(2)} drafts a step and request and gets ${now.tau.toFixed(2)} tokens for it, in steps of ${(1e3 * now.seconds).toFixed(1)} ms.${warning(choice)}`;
    charts(choice, now);
  }

  radios("workloads", "workload", data.workloads.map((value) => ({ value, label: value === "mix" ? "mix of this run" : value })), data.workloads[0]);
  radios("policies", "policy", data.policies.map(({ name, label, colour }) => ({ value: name, label, colour })), "dspark");
  for (const each of data.measured) {
    const entry = document.createElement("span");
    entry.append(swatch(each), each.arm);
    byId("measured-arms").append(entry);
  }
  byId("threshold").value = data.threshold;
  byId("spread").value = model.spread;
  byId("controls").addEventListener("input", update);
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  update();
}

/** A button that goes round: as the system, dark, light. */
function startTheme() {
  const order = ["", "dark", "light"], names = ["as the system", "dark", "light"], button = byId("theme");
  let at = 0;
  button.addEventListener("click", () => {
    at = (at + 1) % order.length;
    if (order[at]) document.documentElement.dataset.theme = order[at];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${names[at]}`;
  });
}

/** What an element with data-tip says, beside it as soon as the pointer is there. */
function startTips() {
  const box = byId("tip");
  document.addEventListener("pointerover", (event) => {
    const at = event.target.closest("[data-tip]");
    box.hidden = !at;
    if (!at) return;
    box.textContent = at.dataset.tip;
    const place = at.getBoundingClientRect(), own = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(place.right + 6, innerWidth - own.width - 4))}px`;
    box.style.top = `${place.top > own.height + 8 ? place.top - own.height - 4 : place.bottom + 4}px`;
  });
  document.addEventListener("scroll", () => { box.hidden = true; }, { passive: true });
}

/** A table's texts as CSV (RFC 4180); "1.2x (1.1-1.3)" becomes three columns. */
function csvOf(table) {
  const rows = [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
  const interval = /^(-?[\d.]+)(?: \((-?[\d.]+)-(-?[\d.]+)\))?x?(?:, .*)?$/;
  const wide = rows[0].map((_, i) => rows.slice(1).some((row) => /\(-?[\d.]+-/.test(row[i] ?? "")));
  const cellsOf = (text, i, head) => {
    if (!wide[i]) return [text];
    if (head) return [text, `${text}, low`, `${text}, high`];
    const found = interval.exec(text);
    return found ? [found[1], found[2] ?? "", found[3] ?? ""] : [text, "", ""];
  };
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  return rows.map((row, n) => row.flatMap((text, i) => cellsOf(text, i, n === 0)).map(quoted).join(",")).join("\r\n") + "\r\n";
}

/** A button at every table that saves it as a file; nothing leaves the page. */
function startDownloads() {
  for (const table of document.querySelectorAll("table[data-name]")) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "csv", textContent: "CSV" });
    button.setAttribute("aria-label", `Save the table ${table.dataset.name} as CSV`);
    button.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([csvOf(table)], { type: "text/csv" }));
      link.download = `${table.dataset.name.toLowerCase().match(/[a-z0-9]+/g).join("-")}.csv`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
    const heading = table.parentElement.previousElementSibling;
    if (heading?.tagName === "H3") heading.append(button);
    else table.parentElement.before(button);
  }
}

if (typeof document !== "undefined") {
  startTheme();
  startTips();
  startDownloads();
  if (byId("data")) startPage(JSON.parse(byId("data").textContent));
}
