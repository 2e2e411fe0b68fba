// The page of `batchsim view`: asks the server for arrays and draws them with uPlot. Texts go in as text, never as HTML.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const WRITE = window.batchsim.write, NINES = window.batchsim.scales.nines;
  const MOST = Math.max(...window.batchsim.nines);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // On a dark ground black is nearly white, and all others are a third of the way there.
  const paint = (color) => {
    if (!dark.matches || printing) return color;
    const parts = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16)), share = Math.max(...parts) ? 0.33 : 0.9;
    return `#${parts.map((part) => Math.round(part + share * (255 - part)).toString(16).padStart(2, "0")).join("")}`;
  };
  const state = { all: null, point: null, replica: 0, window: null, by: "", asked: {}, errors: {}, knobs: [], picked: null, compared: null, way: new Set(), chosen: null };

  // ---- asking

  // What went wrong stands until a question of the same kind is answered.
  function fail(kind, text) {
    state.errors[kind] = text;
    const said = Object.values(state.errors).find(Boolean) || "";
    $("error").textContent = said;
    $("error").hidden = !said;
  }

  // The answer, or null where a newer question of the same kind was asked meanwhile, or it was refused.
  async function ask(kind, parameters, body) {
    const mine = (state.asked[kind] = (state.asked[kind] || 0) + 1);
    const query = parameters ? `?${new URLSearchParams(parameters)}` : "";
    const how = body ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
    let found;
    try {
      found = await (await fetch(`/${kind}${query}`, how)).json();
    } catch {
      found = { error: "batchsim view has ended. Start it again." };
    }
    if (mine !== state.asked[kind]) return null;
    fail(kind, found.error || "");
    return found.error ? null : found;
  }

  const inWindow = () => (state.window ? { from: state.window[0], to: state.window[1] } : {});

  // ---- the address

  // What is looked at stands behind the # of the address: a reload shows it again, and so does the address elsewhere.
  function hash() {
    const [from, to] = state.window || [];
    const kept = { point: state.point.point, replica: state.replica || null, from, to, by: state.by, request: state.picked, with: state.compared };
    return `#${new URLSearchParams(Object.entries(kept).filter(([, value]) => value != null))}`;
  }

  // Back comes to what was looked at before a push; a replacement is a move within that.
  function keep(how) {
    if (hash() !== location.hash) history[`${how}State`](null, "", hash());
  }

  // Shows what the address says, and without one the point to begin with.
  async function restore() {
    const asked = new URLSearchParams(location.hash.slice(1)), wrong = [];
    const number = (name, most) => {
      const text = asked.get(name), value = Number(text);
      if (text == null) return null;
      if (/^\d+(\.\d+)?(e-?\d+)?$/.test(text) && value <= most) return value;
      wrong.push(`${name}=${text}`);
      return null;
    };
    const last = state.all.points.length - 1, from = number("from", Infinity), to = number("to", Infinity);
    const point = number("point", last) ?? state.all.first, replica = number("replica", Infinity);
    const request = number("request", Infinity), other = number("with", last);
    const by = state.all.by.some(([name]) => name === asked.get("by")) ? asked.get("by") : state.all.by[0][0];
    const window = from != null && to != null && from < to ? [from, to] : null;
    const before = JSON.stringify([state.window, state.replica, state.by]);
    if (!state.point || state.point.point !== point) await openPoint(point, false, { window, replica, by });
    else if (before !== JSON.stringify([window, replica ?? (state.point.replicas[0] || 0), by])) {
      Object.assign(state, { window, replica: replica ?? (state.point.replicas[0] || 0), by });
      $("replica").value = state.replica;
      $("by").value = by;
      await look();
    }
    if (!state.point) return;
    if (request == null) closeRequest(); else if (request !== state.picked) await openRequest(request, true);
    if (other == null) uncompared();
    else if (other !== state.compared) { $("other").value = other; await compare(true); }
    fail("address", wrong.length ? `The address says ${wrong.join(", ")}, which this run has not.` : "");
  }
  addEventListener("popstate", restore);

  // ---- elements

  function cell(kind, value, right) {
    const made = document.createElement(kind);
    if (value instanceof Node) made.append(value); else made.textContent = value;
    if (right) made.className = "n";
    return made;
  }

  function fill(table, heads, rows) {
    const text = (value) => (value instanceof Node ? value.textContent : value);
    const numeric = heads.map((_, k) => k > 0 && rows.length > 0 && rows.every((row) => /^[-+–\d]/.test(text(row[k]))));
    const line = (kind, values) => {
      const made = document.createElement("tr");
      made.append(...values.map((value, k) => cell(kind, value, numeric[k])));
      return made;
    };
    const head = document.createElement("thead"), body = document.createElement("tbody");
    head.append(line("th", heads));
    body.append(...rows.map((row) => line("td", row)));
    table.replaceChildren(head, body);
  }

  // A word with what it means, for those who point at it; `name` may have a reason, as in queued:no_slot.
  function told(name, shown) {
    const made = document.createElement("span");
    made.textContent = shown || words(name);
    const meant = state.all.words[name] || name.split(":").map((part) => state.all.words[part]).filter(Boolean).join("; ");
    return meaning(made, meant);
  }

  function meaning(made, meant) {
    if (meant) { made.title = meant; made.classList.add("told"); }
    return made;
  }

  // What opens a request: a link where its life can be told.
  const opens = (id) => ("life" in state.point.lacks ? String(id) : link(id, () => openRequest(id)));

  function link(text, go) {
    const made = document.createElement("button");
    made.type = "button";
    made.className = "link";
    made.textContent = text;
    made.onclick = go;
    return made;
  }

  function options(select, rows, chosen) {
    select.replaceChildren(...rows.map(([value, text]) => {
      const made = document.createElement("option");
      made.value = value;
      made.textContent = text;
      made.selected = String(value) === String(chosen);
      return made;
    }));
  }

  // ---- charts

  const drawn = new Map(); // by the element that holds them: how to draw each again

  // Times so far apart, all in one unit and with the digits that tell them apart: 300.0012 s at a step of 0.2 ms.
  function clock(at, step) {
    const most = Math.max(...at.map(Math.abs)), whole = (of) => Math.abs(step / of - Math.round(step / of)) < 1e-6;
    const [unit, name] = most >= 7200 && whole(360) ? [3600, "h"] : most >= 120 && whole(6) ? [60, "min"]
      : [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]].find(([unit]) => most >= unit) || [1, "s"];
    const digits = Math.min(12, Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-6)));
    return at.map((v) => `${Number((v / unit).toFixed(digits)).toLocaleString("en", { maximumFractionDigits: digits })} ${name}`);
  }

  // The ends of a window, with digits for a hundredth of it.
  const ends = (from, to) => clock([from, to], to > from ? 10 ** Math.floor(Math.log10((to - from) / 100)) : 1).join(" to ");

  // The numbers of an axis across, those that have no room beside the one before left out.
  function apart(u, at, log) {
    const place = (v) => (log ? Math.log(v) : v), { min, max } = u.scales.x;
    const pixels = Math.max(u.width - 90, 1) / (place(max) - place(min) || 1);
    let last = -Infinity;
    return at.map((v) => {
      const text = WRITE.number(v);
      if ((place(v) - last) * pixels < 10 + 7 * text.length) return "";
      last = place(v);
      return text;
    });
  }

  function axis(spec, across) {
    const { label, kind, log } = spec;
    const made = {
      label, stroke: css("--ink"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--line"), width: 1 },
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", size: across ? 44 : spec.nines ? 78 : 66, labelSize: 20,
      values: (u, at) => at.map((v) => (v == null || kind === "none" ? "" : spec.nines && v >= MOST ? "≥99.99 %" : WRITE[kind](v))),
    };
    if (kind === "seconds" && !log) {
      made.incrs = window.batchsim.steps;
      made.values = (u, at) => clock(at, at.length > 1 ? at[1] - at[0] : 1);
    }
    if (spec.nines) Object.assign(made, { splits: () => window.batchsim.nines, filter: (u, at) => at });
    if (spec.at) {
      made.splits = (u, i, min, max) => spec.at.filter((v) => v >= min && v <= max);
      made.filter = (u, at) => at;
      made.values = (u, at) => spec.names ? at.map((v) => spec.names(v)) : apart(u, at, log);
    }
    if (spec.names) made.grid.show = made.ticks.show = false;
    if (across && kind === "seconds") made.space = (u, i, min, max, wide) => (wide < 360 ? 62 : 84);
    return made;
  }

  // One chart in `holder`. `lines` are {label, color, y, kind of drawing, ends of the interval; `depth`: how many later
  // lines lie on it, so that it is drawn wider}; `picked(index, line)` is called for a click,
  // `zoomed(from, to)` for a stretch that was dragged over, null for a double click.
  function chart(holder, spec) {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = spec.caption;
    const place = document.createElement("div");
    figure.append(caption, place);
    holder.append(figure);
    let plot = null, width = 0;
    const scaleOf = ({ log, nines }) => (log ? { distr: 3 } : nines ? { distr: 100, fwd: NINES.to, bwd: NINES.from } : {});
    const range = (log) => (u, min, max) => {
      if (min == null || !isFinite(min)) return log ? [1e-3, 1] : [0, 1];
      for (const v of [spec.target, ...spec.lines.flatMap((line) => [...(line.low || []), ...(line.high || [])])])
        if (v != null) { min = Math.min(min, v); max = Math.max(max, v); }
      if (log) {
        if (!(min > 0)) return [1e-3, 1];
        if (max / min < 4) { const middle = Math.sqrt(min * max); min = middle / 2; max = middle * 2; }
        const below = (v) => { const d = 10 ** Math.floor(Math.log10(v)); return (v / d >= 5 ? 5 : v / d >= 2 ? 2 : 1) * d; };
        return [below(min / 1.1), max * 1.15];
      }
      if (min === 0 && max === 0) return [0, 1];
      const room = 0.05 * (max - min || Math.abs(max) || 1);
      return [min >= 0 ? 0 : min - room, max + room];
    };
    // What lies at an edge is seen whole; a stretch that was dragged over is shown as it is.
    const across = (u, min, max) => {
      if (min == null) return [0, 1];
      if (spec.x.log) return [min / 1.1, max * 1.1];
      const room = 0.03 * (max - min || Math.abs(max) || 1);
      return [min - room, max + room];
    };
    // How far down a cross stands: at its value, and without one at the top, below those of earlier lines at that place.
    const crossAt = (u, k, i) => {
      if (spec.lines[k].y[i] != null) return u.valToPos(spec.lines[k].y[i], "y");
      const above = spec.lines.slice(0, k).filter((line, n) => u.series[n + 1].show && line.crosses && line.crosses[i] && line.y[i] == null);
      return 8 + 13 * above.length;
    };
    const redraw = () => {
      width = printing ? (holder.classList.contains("wide") ? 680 : 330) : Math.max(240, Math.floor(figure.clientWidth));
      if (plot) plot.destroy();
      const series = [{ label: spec.x.label, value: (u, v) => (v == null ? "" : `${spec.x.said || "at"} ${WRITE[spec.x.kind](v)}`) }];
      for (const line of spec.lines)
        series.push({
          label: line.label, stroke: paint(line.color), width: line.dots ? 0 : 1.6 + 2.6 * (line.depth || 0), spanGaps: !line.marked,
          dash: line.dashed ? [6, 4] : undefined, fill: line.dots ? undefined : line.fill && `${paint(line.color)}33`,
          paths: line.dots ? () => null : line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
          points: { show: !!(line.dots || line.marked), size: line.dots ? 5 : 7 + 3 * (line.depth || 0), fill: paint(line.color), width: 0 },
          value: (u, v, i, at) => (at == null ? "" : v == null ? "–" : WRITE[spec.y.kind](v)),
        });
      // The intervals, shaded below the lines, and over no gap.
      const shades = (u) => {
        const { ctx, bbox } = u;
        ctx.save();
        ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
        spec.lines.forEach((line, k) => {
          if (!line.low || !u.series[k + 1].show) return;
          const stretches = [[]];
          spec.xs.forEach((_, i) => {
            if (line.low[i] === null || line.high[i] === null) stretches.push([]);
            else if (line.low[i] !== undefined) stretches[stretches.length - 1].push(i);
          });
          ctx.fillStyle = `${paint(line.color)}26`;
          for (const known of stretches) {
            ctx.beginPath();
            for (const i of known) ctx.lineTo(u.valToPos(spec.xs[i], "x", true), u.valToPos(line.high[i], "y", true));
            for (const i of known.reverse()) ctx.lineTo(u.valToPos(spec.xs[i], "x", true), u.valToPos(line.low[i], "y", true));
            ctx.fill();
          }
        });
        ctx.restore();
      };
      const marks = (u) => {
        const { ctx, bbox } = u, dot = devicePixelRatio || 1;
        ctx.save();
        if (spec.target != null) {
          const y = u.valToPos(spec.target, "y", true);
          ctx.strokeStyle = css("--ink");
          ctx.setLineDash([7 * dot, 4 * dot]);
          ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
        }
        if (spec.diagonal) {
          const low = Math.max(u.scales.x.min, u.scales.y.min), high = Math.min(u.scales.x.max, u.scales.y.max);
          ctx.strokeStyle = css("--soft");
          ctx.beginPath();
          ctx.moveTo(u.valToPos(low, "x", true), u.valToPos(low, "y", true));
          ctx.lineTo(u.valToPos(high, "x", true), u.valToPos(high, "y", true));
          ctx.stroke();
        }
        if (spec.painted) spec.painted(u);
        ctx.setLineDash([]);
        ctx.lineWidth = 2 * dot;
        spec.lines.forEach((line, k) => (line.crosses || []).forEach((cross, i) => {
          if (!cross || !u.series[k + 1].show) return;
          const x = u.valToPos(spec.xs[i], "x", true), r = 5 * dot;
          if (x < bbox.left || x > bbox.left + bbox.width) return;
          const y = bbox.top + crossAt(u, k, i) * dot;
          ctx.strokeStyle = paint(line.color);
          ctx.beginPath();
          for (const [dx, dy] of [[1, 1], [1, -1]]) { ctx.moveTo(x - dx * r, y - dy * r); ctx.lineTo(x + dx * r, y + dy * r); }
          ctx.stroke();
        }));
        ctx.restore();
      };
      plot = new uPlot({
        width, height: spec.height || Math.round(Math.max(220, Math.min(320, width * 0.55))), series,
        scales: {
          x: { time: false, ...scaleOf(spec.x), range: spec.x.range ? () => spec.x.range : across },
          y: { ...scaleOf(spec.y), dir: spec.painted ? -1 : 1, range: spec.y.range ? () => spec.y.range : range(spec.y.log) },
        },
        axes: [axis(spec.x, true), axis(spec.y, false)],
        legend: { show: !spec.painted },
        cursor: {
          drag: { x: true, y: false, setScale: !spec.zoomed, dist: 6 }, points: { size: 8 },
          sync: spec.group ? { key: spec.group, scales: ["x", null] } : undefined,
          bind: spec.zoomed ? { dblclick: () => () => { spec.zoomed(null); return null; } } : {},
        },
        hooks: {
          drawAxes: [shades],
          draw: [marks],
          setSelect: [(u) => {
            const { left, width: across } = u.select;
            if (!spec.zoomed || across < 2 || u.cursor.event == null || u.cursor.event.target !== u.over) return;
            spec.zoomed([u.posToVal(left, "x"), u.posToVal(left + across, "x")]);
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          }],
        },
      }, [spec.xs, ...spec.lines.map((line) => line.y)], place);
      let down = null;
      plot.over.addEventListener("mousedown", (event) => { down = [event.clientX, event.clientY]; });
      plot.over.addEventListener("click", (event) => {
        if (!(spec.picked || spec.at) || (down && Math.hypot(event.clientX - down[0], event.clientY - down[1]) > 5)) return;
        const box = plot.over.getBoundingClientRect();
        (spec.at || pick)(plot, event.clientX - box.left, event.clientY - box.top);
      });
      if (spec.over) plot.over.addEventListener("mousemove", () => spec.over(plot, plot.cursor.left, plot.cursor.top));
    };
    // The value nearest to a click, by pixels, over all lines shown; a cross at the top stands for a value that is none.
    const pick = (u, left, top) => {
      let best = null, least = spec.reach || 30;
      spec.lines.forEach((line, k) => {
        if (!u.series[k + 1].show) return;
        for (let i = 0; i < spec.xs.length; i++) {
          const cross = line.crosses && line.crosses[i];
          if (line.y[i] == null && !cross) continue;
          const y = cross ? crossAt(u, k, i) : u.valToPos(line.y[i], "y");
          const far = Math.hypot(u.valToPos(spec.xs[i], "x") - left, y - top);
          if (far < least) { least = far; best = [i, k]; }
        }
      });
      if (best) spec.picked(...best);
    };
    redraw();
    const fit = () => { if (!printing && figure.clientWidth && Math.max(240, Math.floor(figure.clientWidth)) !== width) redraw(); };
    new ResizeObserver(() => requestAnimationFrame(fit)).observe(figure);
    const list = drawn.get(holder) || [];
    list.push(redraw);
    drawn.set(holder, list);
  }

  function clear(holder) { holder.replaceChildren(); drawn.delete(holder); }
  const again = () => { for (const list of drawn.values()) for (const redraw of list) redraw(); };
  dark.addEventListener("change", again);
  // On paper all is light, and charts are as wide as two beside each other, or one, may be.
  for (const name of ["beforeprint", "afterprint"])
    addEventListener(name, () => {
      printing = name === "beforeprint";
      document.documentElement.classList.toggle("printing", printing);
      again();
    });

  // ---- curves

  async function curves() {
    const found = await ask("curves");
    if (!found) return;
    state.all = found;
    document.title = `${found.name}: batchsim view`;
    $("name").textContent = found.name;
    $("heading").textContent = `${found.heading}. Asked: ${found.objective}.`;
    $("decision").textContent = found.decision[0];
    $("reasons").textContent = found.decision.slice(1).join(" ");
    $("decided").textContent = found.sure.join(" ");
    glossary();
    clear($("curves"));
    let wide = false;
    for (const each of found.charts) {
      const xs = [...new Set(each.series.flatMap((line) => line.x))].sort((a, b) => a - b);
      // A line leads over loads that its policy was not tried at, which are undefined, and over no gap.
      const at = (line, values) => xs.map((x) => { const i = line.x.indexOf(x); return i < 0 ? undefined : values[i]; });
      const { kind, scale } = each.y, log = scale === "log", nines = scale === "nines";
      const lines = each.series.map((line) => ({
        label: line.label, color: line.color, dashed: line.dashed, marked: true, y: at(line, line.y),
        crosses: at(line, line.crosses), points: at(line, line.points),
        low: line.low.length ? at(line, line.low) : null, high: line.high.length ? at(line, line.high) : null,
      }));
      window.batchsim.depths(lines.map((line) => line.y)).forEach((depth, k) => { lines[k].depth = depth; wide ||= depth > 0; });
      const asked = each.target == null ? "" : `, asked: ${WRITE[kind](each.target)} (dashed)`;
      chart($("curves"), {
        caption: `${each.caption}${asked}`, xs, lines, target: each.target, group: "curves",
        x: { label: each.x.label, kind: each.x.kind, log: each.x.scale === "log", at: xs }, y: { label: each.y.label, kind, log, nines, range: nines ? [0, MOST] : null },
        picked: (i, k) => { if (lines[k].points[i] != null) openPoint(lines[k].points[i], true); },
      });
    }
    const of = found.one_seed ? "" : `Lines are means of ${found.seeds}, shaded where that has a 95 % interval; a click opens the first seed, whose own values differ. `;
    const notes = [...new Set(found.charts.map((each) => each.note).filter(Boolean))].map((note) => ` ${note}`).join("");
    $("curves-said").textContent = `${of}Click a value to open its point. Drag across to zoom, double-click to see all. A cross marks a queue that grows${wide ? "; a wide line has another on it, with the same values for the most part" : ""}.${notes}`;
    options($("pick"), found.points.map((point) => [point.point, point.title]));
    options($("by"), found.by, found.by[0][0]);
    await restore();
  }

  // Every word that has a meaning here, for who cannot point at one.
  function glossary() {
    $("words").replaceChildren(...Object.entries(state.all.words).flatMap(([name, meant]) => {
      const word = document.createElement("dt"), said = document.createElement("dd");
      word.textContent = words(name);
      said.textContent = meant;
      return [word, said];
    }));
  }

  // ---- a point

  // With a `view` it is restored from the address, which has it already; so are a request and a comparison if `kept`.
  async function openPoint(number, scroll, view) {
    const found = await ask("point", { point: number });
    if (!found) return;
    Object.assign(state, { point: found, replica: view?.replica ?? (found.replicas[0] || 0), window: clamped(view?.window, found.end_s), by: view?.by || state.by, picked: null, compared: null, way: new Set(), chosen: null });
    $("by").value = state.by;
    for (const id of ["point", "compare", "change"]) $(id).hidden = false;
    $("request").hidden = true;
    $("pick").value = number;
    $("replicas").hidden = found.replicas.length < 2;
    options($("replica"), found.replicas.map((replica) => [replica, replica]), state.replica);
    const many = (n) => n.toLocaleString("en"), steps = found.steps == null ? "" : `, ${many(found.steps)} steps`;
    $("length").textContent = `Whole run: ${many(found.requests)} requests${steps}, ${WRITE.seconds(found.end_s)} long${found.unstable ? "; the queue grows" : ""}.`;
    const measured = found.measured === found.requests ? "all requests" : `the ${many(found.measured)} requests that came after the warm-up${found.warmup ? ` of ${found.warmup}` : ""}`;
    $("metrics").replaceChildren(`Of ${measured}: `, ...found.metrics.map(([name, text, meant]) => {
      const made = document.createElement("span"), value = document.createElement("b");
      value.textContent = text;
      made.append(`${name} `, value, " ");
      return meaning(made, meant);
    }));
    const here = state.all.points[number], others = state.all.points.filter((each) => each.seed === here.seed && each !== here);
    const like = others.find((each) => each.load === here.load) || others[0];
    options($("other"), others.map((each) => [each.point, each.title]), like && like.point);
    $("compare").hidden = !others.length;
    for (const id of ["out", "back", "on", "one", "whole"]) $(id).hidden = "timeline" in found.lacks;
    $("by-number").hidden = "life" in found.lacks;
    $("one").hidden ||= found.keep !== "all";
    for (const [panel, id] of [["compare", "compare-how"], ["change", "change-how"], ["requests", "requests-how"]]) $(id).hidden = panel in found.lacks;
    for (const id of ["queues", "pairs"]) clear($(id));
    for (const id of ["beside", "largest"]) $(id).replaceChildren();
    for (const [panel, id] of [["change", "changed"], ["compare", "compared"]]) $(id).textContent = found.lacks[panel] || "";
    if (!view) keep("push");
    await Promise.all([look(), knobs()]);
    if (scroll) $("point").scrollIntoView({ behavior: "instant" });
  }

  // A panel that has nothing to show says in its place why, and what to do.
  function lacking(panel, ...emptied) {
    const line = state.point.lacks[panel];
    if (!line) return false;
    for (const id of emptied) clear($(id));
    const said = document.createElement("p");
    said.textContent = line;
    $(emptied[0]).append(said);
    return true;
  }

  const look = () => Promise.all([state.point.keep === "minutes" ? minutes() : timeline(), requests(), lanes()]);

  async function minutes() {
    const found = await ask("minutes", { point: state.point.point, replica: state.replica, ...inWindow() });
    if (!found) return;
    const shown = found.exact ? `all ${found.of.toLocaleString("en")} minutes` : `${found.start_s.length.toLocaleString("en")} of ${found.of.toLocaleString("en")} minutes, with every highest and lowest`;
    $("window").textContent = `${ends(found.from_s, found.to_s)}: ${shown}, which were kept in the place of steps`;
    const x = { label: "time since the start of the run", kind: "seconds", range: [found.from_s, found.to_s] };
    const last = found.start_s.length - 1; // the last minute has a length too
    const common = { xs: last < 0 ? [] : [...found.start_s, found.start_s[last] + 60], x, group: "time", zoomed: zoom };
    clear($("timeline"));
    const line = (label, k, y, more) => ({ label, color: state.all.colors[k], y: last < 0 ? [] : [...y, y[last]], stepped: true, ...more });
    chart($("timeline"), { ...common, caption: "Requests running and waiting, mean of each minute", y: { label: "requests", kind: "number" },
      lines: [line("running", 0, found.running), line("waiting", 1, found.waiting)] });
    chart($("timeline"), { ...common, caption: "KV blocks in use, mean of each minute", y: { label: "share of the pool", kind: "share" },
      lines: [line("in use", 2, found.kv_share, { fill: true })] });
    chart($("timeline"), { ...common, caption: "Requests sent and finished each minute", y: { label: "requests", kind: "number" },
      lines: [line("sent", 0, found.sent), line("finished", 2, found.finished)] });
    chart($("timeline"), { ...common, caption: "Share within the SLO, and of the time that steps ran", y: { label: "share", kind: "share", range: [0, 1.05] },
      lines: [line("within the SLO", 3, found.within), line("in steps", 5, found.busy)] });
  }

  // A window within the run, to the nanosecond; null for the whole of it.
  function clamped(window, end) {
    if (!window) return null;
    const [from, to] = [Math.max(0, window[0]), Math.min(end, window[1])].map((at) => Number(at.toFixed(9)));
    return to - from < 1e-9 || (from <= 0 && to >= end) ? null : [from, to];
  }

  async function zoom(window) {
    const moved = state.window && window;
    state.window = clamped(window, state.point.end_s);
    keep(moved ? "replace" : "push");
    await look();
  }

  async function timeline() {
    if (lacking("timeline", "timeline")) { $("window").textContent = ""; return; }
    const found = await ask("timeline", { point: state.point.point, replica: state.replica, ...inWindow() });
    if (!found) return;
    state.steps = found;
    const shown = !found.of ? "no step ran" : found.of === 1 ? "one step" : found.exact ? `all ${found.of.toLocaleString("en")} steps` : `${found.shown.toLocaleString("en")} of ${found.of.toLocaleString("en")} steps, with every highest and lowest`;
    $("window").textContent = `${ends(found.from_s, found.to_s)}: ${shown}`;
    const x = { label: "time since the start of the run", kind: "seconds", range: [found.from_s, found.to_s] };
    const last = found.start_s.length - 1; // the last step has a length too
    const common = { xs: last < 0 ? [] : [...found.start_s, found.until_s], x, group: "time", zoomed: zoom };
    clear($("timeline"));
    const line = (label, k, y, more) => ({ label, color: state.all.colors[k], y: last < 0 ? [] : [...y, y[last]], stepped: true, ...more });
    chart($("timeline"), { ...common, caption: "Requests running and waiting", y: { label: "requests", kind: "number" },
      lines: [line("running", 0, found.running), line("waiting", 1, found.waiting)] });
    chart($("timeline"), { ...common, caption: "KV blocks in use", y: { label: "share of the pool", kind: "share" },
      lines: [line("in use", 2, found.kv_share, { fill: true })] });
    chart($("timeline"), { ...common, caption: "Time of a step", y: { label: "step", kind: "seconds" },
      lines: [line("step", 3, found.step_s)] });
    chart($("timeline"), { ...common, caption: "Tokens of a step", y: { label: "tokens", kind: "number" },
      lines: [line("all", 0, found.tokens), line("of prompts", 1, found.prefill_tokens)] });
  }

  // ---- lanes

  const words = (name) => name.replaceAll("_", " ").replaceAll(":", ": ");
  const colorOf = (what) => state.all.kinds[what] || "#7F7F7F";

  function named(what) {
    const made = document.createElement("span"), key = document.createElement("span");
    key.className = "key";
    key.style.background = paint(colorOf(what));
    made.append(key, told(what));
    return made;
  }

  async function lanes() {
    if (lacking("lanes", "lanes")) {
      state.lanes = null;
      for (const id of ["lanes-said", "lanes-keys", "lane"]) $(id).textContent = "";
      return;
    }
    const its = state.picked == null ? {} : { request: state.picked };
    const found = await ask("lanes", { point: state.point.point, replica: state.replica, ...its, ...inWindow() });
    if (!found) return;
    state.lanes = found;
    state.chosen = null;
    const many = (n) => n.toLocaleString("en"), all = found.id.length === found.of;
    const which = all ? (found.of === 1 ? "the one request that was there" : `all ${many(found.of)} requests that were there`) : `${many(found.id.length)} of ${many(found.of)} requests, first those whose state changes in it, evenly spread; zoom in to see others`;
    const brief = found.shortest_s ? ` Spans shorter than ${WRITE.seconds(found.shortest_s)} are left blank.` : "";
    $("lanes-said").textContent = found.of ? `In the order in which they came: ${which}.${brief} Click a lane for the request's life; with the keyboard ↑ ↓ choose one and Enter opens it.` : "No request was there in this window.";
    clear($("lanes"));
    $("lane").textContent = "";
    keyed();
    if (!found.id.length) return;
    const drawing = window.batchsim.lanes(found, state.all.lanes.map((what) => ({ color: colorOf(what) })), paint, css, () => state);
    chart($("lanes"), {
      caption: "What each request was doing", xs: [found.from_s, found.to_s], lines: [{ label: "lane", color: "#000000", dots: true, y: [null, null] }],
      x: { label: "time since the start of the run", kind: "seconds", range: [found.from_s, found.to_s] }, y: { label: "request", kind: "none", range: drawing.range, at: drawing.numbered, names: drawing.name },
      group: "time", zoomed: zoom, height: drawing.height, painted: drawing.painted,
      at: (u, left, top) => { const hit = drawing.at(u, left, top); if (hit) openRequest(hit.id); },
      over: (u, left, top) => { const hit = drawing.at(u, left, top); if (hit) tell(hit.id, hit.span); },
    });
  }

  // What the colours and frames of the lanes mean.
  function keyed() {
    const kinds = [...new Set(state.lanes.kind)].sort((a, b) => a - b).map((kind) => named(state.all.lanes[kind]));
    const frame = (color, text) => { // a frame around a lane
      const made = named(text);
      Object.assign(made.firstChild.style, { background: "none", border: `2px solid var(${color})` });
      return made;
    };
    if (state.picked != null) kinds.push(frame("--ink", `request ${state.picked}`));
    if (state.way.size) kinds.push(frame("--bad", "stood in its way"));
    $("lanes-keys").replaceChildren(...kinds);
  }

  function tell(id, span) {
    const found = state.lanes;
    const way = span != null && found.blocker[span] >= 0 ? `, for request ${found.blocker[span]}` : "";
    const what = span == null ? "" : `: ${words(state.all.lanes[found.kind[span]])} for ${WRITE.seconds(found.end_s[span] - found.start_s[span])}, from ${WRITE.seconds(found.start_s[span])} on${way}`;
    $("lane").textContent = `request ${id}${what}`;
  }

  // Draws the lanes again where what is marked has changed.
  function remark() {
    if (!state.lanes) return;
    keyed();
    for (const redraw of drawn.get($("lanes")) || []) redraw();
  }

  function choose(by) {
    const found = state.lanes, last = found ? found.id.length - 1 : -1;
    if (last < 0) return;
    state.chosen = state.chosen == null ? (by > 0 ? 0 : last) : Math.max(0, Math.min(last, state.chosen + by));
    const [from, to] = span(), time = (from + to) / 2, id = found.id[state.chosen];
    const its = found.lane.findIndex((lane, i) => lane === state.chosen && found.start_s[i] <= time && time < found.end_s[i]);
    tell(id, its < 0 ? null : its);
    remark();
  }

  // ---- requests

  async function requests() {
    if (lacking("requests", "requests", "slowest")) { $("counted").textContent = ""; return; }
    const found = await ask("requests", { point: state.point.point, by: state.by, ...inWindow() });
    if (!found) return;
    const [from, to] = state.window || [0, state.point.end_s];
    const count = found.exact ? `${found.of.toLocaleString("en")}` : `${found.id.length.toLocaleString("en")} of ${found.of.toLocaleString("en")}, with every highest and lowest`;
    $("counted").textContent = `Sent in this window: ${count}${found.others ? `; ${found.others.toLocaleString("en")} more have no ${found.by}` : ""}. ${state.point.lacks.life ? `Lives are ${state.point.lacks.life[0].toLowerCase()}${state.point.lacks.life.slice(1)}` : "Click one to see its life."}`;
    clear($("requests"));
    if (!found.of) {
      $("counted").textContent = found.others ? `None of the ${found.others.toLocaleString("en")} requests sent in this window has a ${found.by}.` : "No request was sent in this window.";
      $("slowest").replaceChildren();
      return;
    }
    const log = found.value_s.length > 0 && found.value_s.every((v) => v > 0);
    chart($("requests"), {
      caption: `${found.by} of each request`, xs: found.sent_s, zoomed: zoom,
      lines: [{ label: found.by, color: state.all.colors[0], dots: true, y: found.value_s }],
      x: { label: "sent", kind: "seconds", range: [from, to] }, y: { label: found.by, kind: "seconds", log },
      picked: "life" in state.point.lacks ? null : (i) => openRequest(found.id[i]),
    });
    fill($("slowest"), ["request", found.by, "sent", "prompt tokens", "output tokens", "preempted"], found.slowest.map((row) => [
      opens(row.request_id), WRITE.seconds(row.value_s), WRITE.seconds(row.sent_s),
      ...[row.prompt_tokens, row.output_tokens, row.num_preemptions].map((n) => n.toLocaleString("en"))]));
  }

  // ---- a request

  function closeRequest() {
    if (state.picked == null) return;
    Object.assign(state, { picked: null, way: new Set() });
    $("request").hidden = true;
    remark();
  }

  async function openRequest(number, kept) {
    const found = await ask("request", { point: state.point.point, id: number });
    if (!found) return;
    state.life = found;
    state.picked = found.request_id;
    state.way = new Set(found.chapters.flatMap((chapter) => [chapter.head, chapter.blocker]).filter((id) => id != null));
    if (state.lanes && !state.lanes.id.includes(state.picked)) lanes(); else remark();
    if (!kept) keep("push");
    $("request").hidden = false;
    $("request-title").textContent = `Request ${found.request_id}`;
    $("sentence").textContent = found.sentence;
    const kinds = [...new Set(found.chapters.map((chapter) => chapter.what))];
    $("life").replaceChildren(...found.chapters.map((chapter) => {
      const made = document.createElement("span");
      made.style.flex = `${Math.max(chapter.end_ns - chapter.start_ns, 1) / Math.max(found.e2e_ns, 1)} 1 0`;
      made.style.background = paint(colorOf(chapter.what));
      made.title = `${words(chapter.what)}, ${WRITE.seconds((chapter.end_ns - chapter.start_ns) / 1e9)}`;
      return made;
    }));
    fill($("parts"), ["where the time went", "time", "share"], found.parts.map((part) => [
      told(part.part), WRITE.seconds(part.ns / 1e9), WRITE.share(found.e2e_ns ? part.ns / found.e2e_ns : 0)]));
    const most = 100, shown = [...found.chapters];
    const brief = shown.length > most ? shown.map((c) => c.end_ns - c.start_ns).sort((a, b) => b - a)[most - 1] : 0;
    const rows = shown.filter((chapter) => chapter.end_ns - chapter.start_ns >= brief).slice(0, most);
    $("chapters-said").textContent = rows.length < shown.length ? `The ${rows.length} longest of ${shown.length.toLocaleString("en")}.` : `${kinds.length} kinds of time, ${rows.length} chapters.`;
    const who = (id) => (id == null ? "" : link(id, () => openRequest(id)));
    fill($("chapters"), ["what", "from", "for", "steps", "why", told("first in the queue"), told("place taken by")], rows.map((chapter) => [
      named(chapter.what), WRITE.seconds((chapter.start_ns - found.sent_ns) / 1e9), WRITE.seconds((chapter.end_ns - chapter.start_ns) / 1e9),
      String(chapter.steps || "–"), told(chapter.reason), who(chapter.head), who(chapter.blocker)]));
    $("request").scrollIntoView({ behavior: "instant" });
  }

  // ---- two points

  function uncompared() {
    state.compared = null;
    clear($("pairs"));
    $("largest").replaceChildren();
    $("compared").textContent = state.point.lacks.compare || "";
  }

  async function compare(kept) {
    const other = Number($("other").value);
    const found = await ask("compare", { point: state.point.point, other, by: state.by });
    if (!found) return;
    state.compared = other;
    if (!kept) keep("push");
    const many = (n) => n.toLocaleString("en"), change = found.median_change_s, [a, b] = found.unanswered, { by } = found;
    const also = (n, text) => (n ? ` ${many(n)} ${text}` : "");
    const of = (n, side) => (n ? `, ${many(n)} of them without any ${by} in ${side}, since they did not finish there` : "");
    const median = change == null ? `None has a ${by} in both.` : `The median change of the ${many(found.both)} that have one in both is ${change < 0 ? "−" : "+"}${WRITE.seconds(Math.abs(change))}.`;
    const sides = [`A is ${found.titles[0]}.`, `B is ${found.titles[1]}.`].map((text) => {
      const made = document.createElement("span");
      made.textContent = text;
      return made;
    });
    const counted = `${by} of ${many(found.of)} requests: ${many(found.slower)} slower in B${of(b, "B")}; ${many(found.faster)} faster in B${of(a, "A")}. ${median}`
      + also(found.neither, "finished in neither.") + also(found.undefined, `have no ${by} by their nature, in A or in B.`)
      + also(found.only[0], "were sent in A alone.") + also(found.only[1], "were sent in B alone.") + also(found.unlike, "ids have other prompts in B and are left out.");
    $("compared").replaceChildren(...sides, counted);
    clear($("pairs"));
    $("largest").replaceChildren();
    if (!found.both) return;
    const every = [...found.here_s, ...found.there_s], log = every.every((v) => v > 0);
    let low = Infinity, high = 0; // both axes alike, so that the line of no change lies across
    for (const v of every) { low = Math.min(low, v); high = Math.max(high, v); }
    const both = log ? [low / 1.2, high * 1.2] : [0, high * 1.05 || 1];
    chart($("pairs"), {
      caption: `${by} of the ${many(found.both)} requests that have it in both: above the line is slower in B`, xs: found.here_s, diagonal: true, height: 380,
      lines: [{ label: "in B", color: state.all.colors[0], dots: true, y: found.there_s }],
      x: { label: "in A", said: "in A", kind: "seconds", log, range: both }, y: { label: "in B", kind: "seconds", log, range: both },
      picked: "life" in state.point.lacks ? null : (i) => openRequest(found.id[i]),
    });
    fill($("largest"), ["largest changes", "A", "B"], found.largest.map(([id, a, b]) => [
      opens(id), WRITE.seconds(a), WRITE.seconds(b)]));
  }

  // ---- one change

  // The sliders are in octaves: from a quarter to four times.
  const moved = () => state.knobs.filter((knob) => Number(knob.slider.value) !== 0);

  async function knobs() {
    state.knobs = [];
    $("knobs").replaceChildren();
    $("change-how").hidden = true;
    if ("change" in state.point.lacks) return;
    const found = await ask("knobs", { point: state.point.point });
    if (!found) return;
    $("changed").textContent = found.why && `Not simulated here: ${found.why}`;
    $("change-how").hidden = !!found.why;
    for (const knob of found.knobs) {
      const label = document.createElement("label"), slider = document.createElement("input"), value = document.createElement("output");
      Object.assign(slider, { type: "range", min: -2, max: 2, step: 0.05, value: 0, id: `knob-${knob.key}` });
      Object.assign(label, { textContent: knob.name, htmlFor: slider.id });
      meaning(label, state.all.words[knob.name]);
      slider.oninput = slid;
      slider.ondblclick = () => { slider.value = 0; slid(); };
      $("knobs").append(label, slider, value);
      state.knobs.push({ ...knob, slider, output: value });
    }
    slid();
  }

  function slid() {
    for (const { value, unit, whole, slider, output } of state.knobs) {
      const octaves = Number(slider.value), after = value * 2 ** octaves;
      const written = `${WRITE.number(whole ? Math.max(1, Math.round(after)) : after)}${unit}`;
      output.textContent = octaves ? `${WRITE.number(value)}${unit} → ${written}` : written;
      output.className = octaves ? "moved" : "";
      slider.setAttribute("aria-valuetext", written);
    }
    $("simulate").disabled = !moved().length || state.simulating;
    $("reset").disabled = !moved().length;
  }

  async function simulate() {
    state.simulating = true;
    $("running").textContent = "simulating …";
    slid();
    const factors = Object.fromEntries(moved().map(({ key, slider }) => [key, 2 ** Number(slider.value)]));
    const found = await ask("counterfactual", null, { point: state.point.point, factors });
    state.simulating = false;
    $("running").textContent = "";
    slid();
    if (!found) return;
    const change = found.knobs.map(({ name, before, after }) => `${name} ${before} → ${after}`).join(", ");
    const misses = `${found.misses[0].toLocaleString("en")} SLO misses before, ${found.misses[1].toLocaleString("en")} after`;
    const each = found.no_effect ? "no request's times changed" : found.vanish ? `${found.vanish.length.toLocaleString("en")} vanish, ${found.appear.length.toLocaleString("en")} appear` : "the requests differ, so no two are compared";
    $("changed").textContent = `${change}: ${misses}; ${each}.${found.rerun ? ` The results were ${found.rerun}; the unchanged point was simulated for this.` : ""}`;
    fill($("beside"), ["metric", "before", "after"], found.texts.map(([name, before, after, meant]) => {
      const made = document.createElement("span");
      made.textContent = name;
      return [meaning(made, meant), before, after];
    }));
    clear($("queues"));
    const sides = found.queues, xs = [...new Set(sides.flatMap((side) => side.start_s))].sort((a, b) => a - b);
    const onto = (side) => {
      const last = side.start_s[side.start_s.length - 1];
      let k = -1;
      return xs.map((x) => {
        while (k + 1 < side.start_s.length && side.start_s[k + 1] <= x) k++;
        return k < 0 || x > last ? null : side.waiting[k];
      });
    };
    chart($("queues"), {
      caption: "Requests waiting, before and after", xs, x: { label: "time since the start of the run", kind: "seconds" }, y: { label: "requests", kind: "number" },
      lines: sides.map((side, k) => ({ label: ["before", "after"][k], color: state.all.colors[k], y: onto(side), stepped: true })),
    });
  }

  // ---- what is clicked

  const span = () => state.window || [0, state.point.end_s];
  const wide = (by) => { const [a, b] = span(), half = ((b - a) * by) / 2, at = (a + b) / 2; return zoom([at - half, at + half]); };
  const shift = (by) => {
    const [a, b] = span(), far = Math.max(-a, Math.min((b - a) * by, state.point.end_s - b));
    return zoom([a + far, b + far]);
  };
  $("pick").onchange = () => openPoint(Number($("pick").value), false);
  $("replica").onchange = () => { state.replica = Number($("replica").value); keep("push"); look(); };
  $("by").onchange = () => { state.by = $("by").value; keep("replace"); requests(); };
  $("whole").onclick = () => zoom(null);
  $("out").onclick = () => wide(4);
  $("back").onclick = () => shift(-0.5);
  $("on").onclick = () => shift(0.5);
  $("one").onclick = () => {
    if (!state.steps) return;
    const [a, b] = span(), { start_s: starts, step_s: lengths } = state.steps;
    const ran = starts.map((_, k) => k).filter((k) => lengths[k] > 0); // idle time has no length
    const k = ran.find((k) => starts[k] + lengths[k] > (a + b) / 2) ?? ran.at(-1);
    if (k != null) zoom([starts[k], starts[k] + lengths[k]]);
  };
  const keys = {
    ArrowLeft: () => shift(-0.25), ArrowRight: () => shift(0.25), "+": () => wide(0.5), "=": () => wide(0.5), "-": () => wide(2), 0: () => zoom(null),
    ArrowUp: () => choose(-1), ArrowDown: () => choose(1), Enter: () => { if (state.chosen != null) openRequest(state.lanes.id[state.chosen]); },
  };
  for (const [id, mine] of [["timeline", /^(ArrowLeft|ArrowRight|[-+=0])$/], ["lanes", /./]]) {
    $(id).tabIndex = 0;
    $(id).onkeydown = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target !== $(id) || !mine.test(event.key) || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    };
  }
  $("its-time").onclick = async () => {
    const { sent_ns: sent, e2e_ns: long } = state.life;
    await zoom([(sent - long * 0.05) / 1e9, (sent + Math.max(long, 1) * 1.05) / 1e9]);
    $("lanes").scrollIntoView({ block: "center", behavior: "instant" });
    $("lanes").focus({ preventScroll: true });
  };
  $("go").onclick = () => openRequest($("id").value);
  $("id").onkeydown = (event) => { if (event.key === "Enter") $("go").click(); };
  $("pair").onclick = () => compare();
  $("reset").onclick = () => { for (const { slider } of state.knobs) slider.value = 0; slid(); };
  $("simulate").onclick = simulate;
  curves();
})();
