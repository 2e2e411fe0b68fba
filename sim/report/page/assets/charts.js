// Draws the charts of a page with uPlot: hover tells the values, a click on a name hides its line, buttons change scales.
"use strict";
(() => {
  const NINES = [0, 0.5, 0.9, 0.99, 0.999, 0.9999];
  const MOST = NINES[NINES.length - 1];
  const POINT = 0.001; // a tenth of a percentage point
  const SIGNED = [1, 0.1, 0.01, 0.001].flatMap((v) => [-v, v]).concat(0).sort((a, b) => a - b);
  // How values are placed on an axis, and where its labels stand; uPlot itself sees linear axes alone.
  const SCALES = {
    linear: { to: (v) => v, from: (v) => v },
    log: { to: (v) => (v > 0 ? Math.log10(v) : null), from: (v) => 10 ** v },
    nines: { to: (v) => -Math.log10(1 - Math.min(Math.max(v, 0), MOST)), from: (v) => 1 - 10 ** -v },
    // Even around 0, then as log: a tenth of a point and a hundred points below 0 are both seen.
    signed: { to: (v) => Math.sign(v) * Math.log10(1 + Math.abs(v) / POINT), from: (v) => Math.sign(v) * POINT * (10 ** Math.abs(v) - 1) },
  };
  const OTHER = { number: "log", seconds: "log", share: "nines", points: "signed" };

  // The page's colours, which follow its light or dark scheme; a page is printed on white.
  let printing = false;
  const css = (name, light) => (!printing && getComputedStyle(document.documentElement).getPropertyValue(name).trim()) || light;
  const DARK = matchMedia("(prefers-color-scheme: dark)");
  const brightness = (parts) => {
    const [r, g, b] = parts.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const DIMMEST = 0.13; // of a line on the dark page: a contrast of 3
  // A line's colour, lighter where the page is dark and it would not be seen.
  function seen(color) {
    let parts = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16) / 255);
    while (DARK.matches && !printing && brightness(parts) < DIMMEST) parts = parts.map((v) => v + 0.1 * (1 - v));
    return `#${parts.map((v) => Math.round(255 * v).toString(16).padStart(2, "0")).join("")}`;
  }

  const digits = (v, n) => String(Number(v.toPrecision(n)));
  const UNITS = [[3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
  const WRITE = {
    number: (v) => (Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : digits(v, 3)),
    points: (v) => (v < -1 ? "below −100 points" : `${v > 0 ? "+" : v < 0 ? "−" : ""}${digits(100 * Math.abs(v), 3)} points`),
    share: (v) => (v > MOST && v < 1 ? ">99.99 %" : `${digits(100 * v, v < 0.9 ? 3 : 4)} %`), // near 1 digits tell nines apart
    seconds: (v) => {
      for (const [unit, of] of UNITS) if (v >= unit * (unit > 1 ? 2 : 1)) return `${digits(v / unit, 3)} ${of}`;
      return v ? `${digits(v * 1e9, 3)} ns` : "0 s";
    },
  };
  // Steps of a linear axis of time, in seconds: round in the unit that they are written in.
  const STEPS = [-9, -8, -7, -6, -5, -4, -3, -2, -1, 0].flatMap((k) => [1, 2, 5].map((n) => Number(`${n}e${k}`)));
  STEPS.push(10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 7 * 86400, 28 * 86400);
  // A tick in the largest unit in which it has three digits: 200 s, not 3.33 min.
  const tickOf = (v) => {
    const exact = UNITS.find(([unit]) => v >= unit && Math.abs(Number(digits(v / unit, 3)) * unit - v) < 1e-9 * v);
    return exact ? `${digits(v / exact[0], 3)} ${exact[1]}` : WRITE.seconds(v);
  };

  // For each line how many later ones lie on it, within 1 % at half or more of the places of both, if these are two or
  // more: it is drawn wider.
  function depths(lines) {
    const on = (one, other) => {
      const both = one.map((_, i) => i).filter((i) => one[i] != null && other[i] != null);
      const close = both.filter((i) => Math.abs(one[i] - other[i]) <= 0.01 * Math.abs(other[i]));
      return both.length > 1 && 2 * close.length >= both.length;
    };
    return lines.map((line, k) => Math.min(3, lines.slice(k + 1).filter((later) => on(line, later)).length));
  }

  function splits(axis, scale, min, max) {
    if (scale === "nines") return NINES.map(SCALES.nines.to).filter((v) => v >= min - 0.1 && v <= max + 0.1);
    if (scale === "signed") return SIGNED.map(SCALES.signed.to).filter((v) => v >= min && v <= max);
    const decades = max - min;
    const subs = decades < 1.2 ? [1, 2, 3, 5, 7] : decades < 3 ? [1, 2, 5] : [1];
    const found = [];
    for (let k = Math.floor(min); k <= Math.ceil(max); k++)
      for (const sub of subs) {
        const at = k + Math.log10(sub);
        if (at >= min && at <= max) found.push(at);
      }
    return found;
  }

  function axisOf(axis, scale, across) {
    const tick = axis.kind === "seconds" ? tickOf
      : axis.kind === "points" ? (v) => digits(100 * v, 3).replace("-", "−") : WRITE[axis.kind];
    const write = (v) => (axis.names.length ? axis.names[v] || "" : tick(SCALES[scale].from(v)));
    const made = {
      label: axis.label,
      stroke: css("--ink", "#333"),
      grid: { stroke: css("--grid", "#e3e3e3"), width: 1 },
      ticks: { stroke: css("--line", "#ccc"), width: 1 },
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
      size: across ? 44 : scale === "nines" ? 78 : 66,
      labelSize: 20,
      values: (u, at) => at.map((v) => (scale === "nines" && v >= SCALES.nines.to(MOST) - 1e-6 ? "≥99.99 %" : write(v))),
    };
    if (scale !== "linear") made.splits = (u, i, min, max) => splits(axis, scale, min, max);
    if (axis.names.length) made.incrs = [1, 2, 3, 4, 6, 12];
    else if (axis.kind === "seconds" && scale === "linear") made.incrs = STEPS;
    return made;
  }

  function draw(figure, chart, scales, width) {
    const place = { x: SCALES[scales.x].to, y: SCALES[scales.y].to };
    const xs = [...new Set(chart.series.flatMap((s) => s.x))].filter((v) => place.x(v) !== null).sort((a, b) => a - b);
    const index = new Map(xs.map((v, i) => [v, i]));
    const column = (s, values) => {
      const found = new Array(xs.length).fill(undefined); // a line leads over loads that it was not tried at, and over no gap
      s.x.forEach((v, i) => {
        if (index.has(v)) found[index.get(v)] = values[i] == null ? null : place.y(values[i]);
      });
      return found;
    };
    const data = [xs.map(place.x)];
    const series = [{ label: chart.x.label, value: (u, v) => (v == null ? "" : writeX(v)) }];
    const writeX = (v) => (chart.x.names.length ? chart.x.names[v] : WRITE[chart.x.kind](SCALES[scales.x].from(v)));
    const bands = [], parts = new Map(), marks = [], open = [];
    const raws = chart.series.map((s) => new Map(s.x.map((v, i) => [v, s.y[i]])));
    const deep = depths(raws.map((raw, k) => xs.map((v) => (chart.series[k].joined ? raw.get(v) : null))));
    for (const s of chart.series.map((each, k) => ({ ...each, color: seen(each.color), depth: deep[k] }))) {
      const at = data.length, raw = new Map(s.x.map((v, i) => [v, s.y[i]]));
      data.push(column(s, s.y));
      series.push({
        label: s.label, stroke: s.color, width: s.joined ? 2 + 2.6 * s.depth : 0, dash: s.dashed ? [6, 4] : undefined,
        points: { show: true, size: 7 + 3 * s.depth, fill: s.color, stroke: s.color },
        value: (u, v, i, k) => {
          if (k == null) return "";
          if (v == null) return "–";
          const value = WRITE[chart.y.kind](raw.get(xs[k]));
          return k === u.cursor.idx ? value : `${value} at ${writeX(data[0][k])}`;
        },
      });
      if (s.crosses.length) marks.push({ at, s });
      if (s.hollow.some((each) => each)) open.push({ at, s });
      if (!s.high.length) continue;
      const hidden = { stroke: "transparent", width: 0, points: { show: false }, class: "end" };
      data.push(column(s, s.high), column(s, s.low));
      series.push({ ...hidden, label: "" }, { ...hidden, label: "" });
      bands.push({ series: [at + 1, at + 2], fill: `${s.color}26` });
      parts.set(at, [at + 1, at + 2]);
    }
    const nearest = (u, i, k) => {
      const values = u.data[i];
      for (let off = 0; off < values.length; off++)
        for (const at of [k - off, k + off]) if (values[at] != null) return at;
      return k;
    };
    const under = (u) => {
      const { ctx, bbox } = u;
      ctx.save();
      for (const [from, to, color] of chart.bands) {
        const ends = [from, to].map((v) => u.valToPos(place.x(v), "x", true));
        ctx.fillStyle = `${color}26`;
        ctx.fillRect(ends[0], bbox.top, ends[1] - ends[0], bbox.height);
      }
      ctx.restore();
    };
    const over = (u) => {
      const { ctx, bbox } = u, dot = devicePixelRatio || 1;
      ctx.save();
      if (chart.target !== null) {
        const y = u.valToPos(place.y(chart.target), "y", true);
        ctx.strokeStyle = ctx.fillStyle = css("--ink", "#000");
        ctx.lineWidth = 1.2 * dot;
        ctx.setLineDash([7 * dot, 4 * dot]);
        ctx.beginPath();
        ctx.moveTo(bbox.left, y);
        ctx.lineTo(bbox.left + bbox.width, y);
        ctx.stroke();
        ctx.setLineDash([]);
        ctx.font = `${12 * dot}px system-ui, sans-serif`;
        ctx.textAlign = "right";
        ctx.textBaseline = "bottom";
        const said = [`${chart.asked}: ${WRITE[chart.y.kind](chart.target)}`, bbox.left + bbox.width, y - 3 * dot];
        ctx.strokeStyle = css("--back", "#fff"); // a halo, where lines cross it
        ctx.lineWidth = 3 * dot;
        ctx.strokeText(...said);
        ctx.fillText(...said);
      }
      for (const { at, s } of open) {
        if (!u.series[at].show) continue;
        ctx.strokeStyle = s.color;
        ctx.fillStyle = css("--back", "#fff");
        ctx.lineWidth = 1.6 * dot;
        s.x.forEach((v, i) => {
          if (!s.hollow[i] || place.x(v) === null || s.y[i] == null || place.y(s.y[i]) === null) return;
          ctx.beginPath();
          ctx.arc(u.valToPos(place.x(v), "x", true), u.valToPos(place.y(s.y[i]), "y", true), 4 * dot, 0, 2 * Math.PI);
          ctx.fill();
          ctx.stroke();
        });
      }
      for (const { at, s } of marks) {
        if (!u.series[at].show) continue;
        ctx.strokeStyle = s.color;
        ctx.lineWidth = 2.2 * dot;
        s.x.forEach((v, i) => {
          if (!s.crosses[i] || place.x(v) === null) return;
          const value = s.y[i] == null ? null : place.y(s.y[i]);
          const x = u.valToPos(place.x(v), "x", true), r = 5 * dot;
          // Without a value it stands at the top, below those of earlier lines at that place.
          const above = marks.filter((each) => each.at < at && u.series[each.at].show
            && each.s.x.some((w, j) => w === v && each.s.crosses[j] && each.s.y[j] == null)).length;
          const y = value === null ? bbox.top + (8 + 13 * above) * dot : u.valToPos(value, "y", true);
          ctx.beginPath();
          for (const [dx, dy] of [[1, 1], [1, -1]]) { ctx.moveTo(x - dx * r, y - dy * r); ctx.lineTo(x + dx * r, y + dy * r); }
          ctx.stroke();
        });
      }
      ctx.restore();
    };
    const range = (name) => (u, min, max) => {
      if (min == null) return [0, 1];
      const target = name === "y" && chart.target !== null ? place.y(chart.target) : min;
      if (scales[name] === "nines") return [-0.08, place.y(MOST) + 0.15];
      min = Math.min(min, target); max = Math.max(max, target);
      const flat = Math.log10(4); // a flat curve should look flat
      if (scales[name] === "log" && max - min < flat) [min, max] = [(min + max - flat) / 2, (min + max + flat) / 2];
      const room = 0.06 * (max - min || Math.abs(max) || 1);
      const floor = scales[name] === "linear" && name === "y" && min >= 0 ? 0 : min - room;
      return [floor, max + room];
    };
    return new uPlot({
      width, height: Math.round(Math.max(240, Math.min(360, width * 0.6))), series, bands,
      scales: { x: { time: false, range: range("x") }, y: { range: range("y") } },
      axes: [axisOf(chart.x, scales.x, true), axisOf(chart.y, scales.y, false)],
      cursor: { dataIdx: nearest, drag: { x: false, y: false } },
      legend: { live: true, markers: { fill: (u, i) => u.series[i].points.fill(u, i) } },
      hooks: {
        drawClear: [under], draw: [over],
        setSeries: [(u, i, how) => {
          if (i != null && how.show != null && parts.has(i)) for (const at of parts.get(i)) u.setSeries(at, how);
        }],
      },
    }, data, figure.querySelector(".plot"));
  }

  function widthOf(figure) { return Math.max(240, Math.floor(figure.clientWidth)); }

  window.batchsim = { write: WRITE, depths, tick: tickOf, steps: STEPS, scales: SCALES, nines: NINES }; // for pages that draw charts of their own
  const redraws = [];
  for (const figure of document.querySelectorAll("figure.chart")) {
    const chart = JSON.parse(figure.querySelector("script").textContent);
    const scales = { x: chart.x.scale, y: chart.y.scale };
    let plot = null, drawn = 0;
    const redraw = (width) => {
      drawn = width;
      const shown = plot ? plot.series.map((s) => s.show) : [];
      if (plot) plot.destroy();
      plot = draw(figure, chart, scales, width);
      shown.forEach((show, i) => { if (i && !show) plot.setSeries(i, { show: false }); });
    };
    const buttons = document.createElement("div");
    buttons.className = "scales";
    for (const name of ["y", "x"]) {
      const axis = chart[name];
      const values = chart.series.flatMap((s) => s[name]).filter((v) => v != null);
      if (axis.names.length || !(axis.kind === "points" || values.some((v) => v > 0))) continue;
      if (OTHER[axis.kind] === "log" && values.some((v) => v <= 0)) continue;
      const button = document.createElement("button");
      button.type = "button";
      const say = () => { button.textContent = `${name} scale: ${scales[name]} ▾`; };
      button.title = `Change the scale of ${axis.label}`;
      button.onclick = () => {
        scales[name] = scales[name] === "linear" ? OTHER[axis.kind] : "linear";
        say();
        redraw(widthOf(figure));
      };
      say();
      buttons.append(button);
    }
    figure.insertBefore(buttons, figure.querySelector(".plot"));
    const fit = () => { const width = widthOf(figure); if (width !== drawn) redraw(width); };
    fit();
    new ResizeObserver(fit).observe(figure);
    redraws.push({ fit, print: () => redraw(330), again: () => redraw(widthOf(figure)) });
  }
  addEventListener("beforeprint", () => {
    printing = true;
    for (const fold of document.querySelectorAll("details")) fold.open = true;
    for (const each of redraws) each.print();
  });
  addEventListener("afterprint", () => { printing = false; for (const each of redraws) each.fit(); });
  DARK.addEventListener("change", () => { for (const each of redraws) each.again(); });
})();
