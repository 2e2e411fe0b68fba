// A lane for each request: what it was doing when, painted into a chart of time. `lanes(found, kinds, paint, css)` gives
// what the chart needs: its size, how it is painted, and what lies at a place.
"use strict";
window.batchsim.lanes = (found, kinds, paint, css, marked) => {
  const count = Math.max(found.id.length, 1), tall = Math.max(4, Math.min(20, Math.round(640 / count)));
  const spans = found.id.map(() => []);
  found.lane.forEach((lane, i) => spans[lane].push(i));

  function painted(u) {
    const { ctx, bbox } = u, dot = devicePixelRatio || 1;
    const across = (t) => Math.max(bbox.left, Math.min(bbox.left + bbox.width, u.valToPos(t, "x", true)));
    const top = (lane) => u.valToPos(lane, "y", true), high = top(1) - top(0), room = high > 5 * dot ? dot : 0;
    const colors = kinds.map(({ color }) => paint(color));
    ctx.save();
    for (let i = 0; i < found.lane.length; i++) {
      const left = across(found.start_s[i]), right = across(found.end_s[i]);
      ctx.fillStyle = colors[found.kind[i]];
      ctx.fillRect(left, top(found.lane[i]) + room / 2, Math.max(right - left, 0.5 * dot), high - room);
    }
    const { picked, way, chosen } = marked();
    found.id.forEach((id, lane) => {
      const is = id === picked ? "--ink" : way.has(id) ? "--bad" : lane === chosen ? "--mark" : null;
      if (!is) return;
      ctx.strokeStyle = ctx.fillStyle = css(is);
      ctx.lineWidth = 2 * dot;
      ctx.strokeRect(bbox.left + dot, top(lane), bbox.width - 2 * dot, high);
      ctx.font = `600 ${12 * dot}px system-ui, sans-serif`;
      ctx.textAlign = "right"; ctx.textBaseline = "middle";
      ctx.fillStyle = css("--back"); // over the axis, whose numbers it may meet
      ctx.fillRect(bbox.left - 40 * dot, top(lane + 0.5) - 7 * dot, 38 * dot, 14 * dot);
      ctx.fillStyle = ctx.strokeStyle;
      ctx.fillText(String(id), bbox.left - 4 * dot, top(lane + 0.5));
    });
    ctx.restore();
  }

  // The lane and the span at a place in pixels of the chart; null above and below the lanes.
  function at(u, left, top) {
    const lane = Math.floor(u.posToVal(top, "y")), time = u.posToVal(left, "x");
    if (!(lane >= 0 && lane < found.id.length)) return null;
    const span = spans[lane].find((i) => found.start_s[i] <= time && time < found.end_s[i]);
    return { lane, id: found.id[lane], span: span === undefined ? null : span };
  }

  // As many numbers of requests beside the lanes as have room.
  const each = Math.ceil(14 / tall), numbered = found.id.map((_, lane) => lane + 0.5).filter((_, lane) => lane % each === 0);
  const name = (place) => String(found.id[Math.floor(place)]);

  return { numbered, name, height: 88 + Math.max(32, count * tall), range: [0, count], painted, at };
};
