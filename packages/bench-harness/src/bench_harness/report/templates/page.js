"use strict";
// Links open what is folded, and the heads of tables sort.
const unfold = () => {
  const target = document.getElementById(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement) target.open = true;
};
addEventListener("hashchange", unfold);
unfold();
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].textContent.trim();
    const rows = [...table.tBodies[0].rows].sort((a, b) =>
      key(a).localeCompare(key(b), "en", { numeric: true }));
    const numeric = rows.every((row) => key(row) === "" || !isNaN(Number(key(row))));
    if (numeric) rows.sort((a, b) => Number(key(a)) - Number(key(b)));
    table.tBodies[0].append(...(down ? rows.reverse() : rows));
  }));
}

// A canvas that shows recorded steps: a lane for each stream of each rank, two variants on one time
// axis, with search, zoom and hover. Times are nanoseconds. Names are only ever set as text.
(() => {
  const KINDS = ["matmul", "attention", "other", "hidden", "copy"];  // by the numbers in `work`
  const OTHER = 2, COMMUNICATION = 3, COPY = 4;
  const GUTTER = 68, ROW = 18, TITLE = 22, AXIS = 22, SHORTEST = 100, LISTED = 12;
  const FONT = "12px system-ui, sans-serif";
  const ms = (ns) => (ns / 1e6).toPrecision(4) / 1 + " ms";
  const time = (ns) => ns && ns < 1e5 ? (ns / 1e3).toPrecision(3) / 1 + " µs" : ms(ns);

  // The first position in sorted values that is above a limit.
  const above = (values, limit) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] > limit) high = middle; else low = middle + 1;
    }
    return low;
  };

  // Lanes with starts and ends instead of gaps and durations.
  const decode = (rank) => {
    const lanes = rank.lanes.map(({ name, spans }) => {
      const count = spans.length / 3;
      const start = new Float64Array(count), end = new Float64Array(count);
      const names = new Uint32Array(count);
      for (let i = 0, at = rank.offset_ns; i < count; i++) {
        start[i] = at += spans[3 * i];
        end[i] = at += spans[3 * i + 1];
        names[i] = spans[3 * i + 2];
      }
      return { name, start, end, names, lost: [] };
    });
    const busy = [];
    for (const { start, end, names } of lanes)
      for (let i = 0; i < start.length; i++)
        if (rank.work[names[i]] < COMMUNICATION) busy.push([start[i], end[i]]);
    busy.sort((a, b) => a[0] - b[0]);
    const joined = [];
    for (const [start, end] of busy)
      if (joined.length && start <= joined.at(-1)[1])
        joined.at(-1)[1] = Math.max(joined.at(-1)[1], end);
      else joined.push([start, end]);
    const ends = joined.map((each) => each[1]);
    for (const lane of lanes)  // communication with nothing computed meanwhile
      for (let i = 0; i < lane.start.length; i++) {
        if (rank.work[lane.names[i]] !== COMMUNICATION) continue;
        let at = lane.start[i];
        for (let k = above(ends, at); k < joined.length && joined[k][0] < lane.end[i]; k++) {
          if (joined[k][0] > at) lane.lost.push([at, joined[k][0]]);
          at = joined[k][1];
        }
        if (at < lane.end[i]) lane.lost.push([at, lane.end[i]]);
      }
    const shifted = (each) => each.map((end) => end + rank.offset_ns);
    return { ...rank, lanes, late: rank.late.map(shifted),
      phases: rank.phases.map(([name, ...ends]) => [name, ...shifted(ends)]) };
  };

  const start = (box) => {
    const lines = JSON.parse(box.querySelector("script").textContent);
    const find = (selector) => box.querySelector(selector);
    const canvas = find("canvas"), pen = canvas.getContext("2d"), tip = find(".tip");
    const chosen = [...box.querySelectorAll("select")], search = find("[type=search]");
    const every = find("[type=checkbox]"), status = find("[role=status]"), body = find("tbody");
    const decoded = new Map();
    let from = 0, to = 1, whole = 1, rows = [], height = 0, found = [], next = 0;
    let colours = {}, waiting = false, room = 1;

    const ranksOf = (name) => {
      if (!decoded.has(name)) decoded.set(name, lines[name].ranks.map(decode));
      return decoded.get(name);
    };
    // The shown ranks of both variants.
    const shown = () => [...new Set(chosen.map((each) => each.value).filter(Boolean))].flatMap(
      (name) => ranksOf(name).map((rank, number) => ({ name, number, rank })).filter(
        ({ number }) => every.checked || number === lines[name].drawn));

    const arrange = () => {
      rows = [];
      let y = AXIS;
      const add = (row, size) => { rows.push({ y, size, ...row }); y += size; };
      const parts = shown();
      for (const { name, number, rank } of parts) {
        const many = lines[name].ranks.length > 1 ? `, rank ${number}` : "";
        const exposed = rank.exposed_ns ? `, ${ms(rank.exposed_ns)} exposed` : "";
        add({ title: name + many, facts: `${ms(rank.window_ns)}${exposed}`, rank }, TITLE);
        if (rank.phases.length) add({ phases: rank.phases, rank }, ROW);
        for (const lane of rank.lanes) add({ lane, rank }, ROW);
      }
      height = y + 6;
      const ends = parts.map(({ rank }) => rank.offset_ns + rank.window_ns);
      whole = Math.max(1, ...ends);
      match();
    };

    // The spans whose names hold the text, in order of time.
    const match = () => {
      const text = search.value.trim().toLowerCase();
      found = [];
      for (const row of rows) {
        row.hits = text && row.lane
          ? row.rank.names.map((name) => name.toLowerCase().includes(text)) : null;
        if (!row.hits) continue;
        row.lane.names.forEach((name, i) => {
          if (row.hits[name]) found.push([row.lane.start[i], row.lane.end[i]]);
        });
      }
      found.sort((a, b) => a[0] - b[0]);
      next = 0;
    };

    const show = (a, b) => {
      const length = Math.min(Math.max(b - a, SHORTEST), whole);
      from = Math.min(Math.max(0, a + (b - a - length) / 2), whole - length);
      to = from + length;
      later();
    };
    const zoom = (factor, at = (from + to) / 2) => show(
      at - (at - from) * factor, at + (to - at) * factor);
    const pan = (share) => show(from + share * (to - from), to + share * (to - from));
    const later = () => {
      if (!waiting) requestAnimationFrame(draw);
      waiting = true;
    };

    const x = (at) => GUTTER + room * (at - from) / (to - from);

    const text = (words, left, y, limit, colour) => {
      pen.fillStyle = colour;
      while (words && pen.measureText(words).width > limit)
        words = words.slice(0, Math.floor(words.length * 0.9 - 1));
      pen.fillText(words, left, y);
    };

    // Spans narrower than a pixel share one, which is as opaque as they fill it.
    const boxes = (count, spanAt, first, colourOf, y, size, least = 0.2) => {
      const alpha = pen.globalAlpha;
      let pixel = -1, filled = 0;
      const flush = () => {
        if (pixel < 0) return;
        pen.globalAlpha = alpha * Math.min(1, Math.max(filled, least));
        pen.fillRect(pixel, y, 1, size);
        pen.globalAlpha = alpha;
        pixel = -1;
      };
      for (let i = first; i < count; i++) {
        const [a, b] = spanAt(i);
        if (a >= to) break;
        const left = Math.max(x(a), GUTTER), width = Math.min(x(b), GUTTER + room) - left;
        const colour = b > from ? colourOf(i) : null;
        if (!colour) continue;
        if (width >= 1 || Math.floor(left) !== pixel) {
          flush();
          pen.fillStyle = colour;
          filled = 0;
        }
        if (width >= 1) pen.fillRect(left, y, width - (width > 4), size);
        else [pixel, filled] = [Math.floor(left), filled + width];
      }
      flush();
    };
    const labels = (count, spanAt, first, colourOf, y, size, labelOf) => {
      for (let i = first; i < count; i++) {
        const [a, b] = spanAt(i);
        if (a >= to) break;
        const left = Math.max(x(a), GUTTER), width = Math.min(x(b), GUTTER + room) - left;
        const colour = width > 44 ? colourOf(i) : null;
        if (colour) text(labelOf(i), left + 4, y + size / 2, width - 8, colour);
      }
    };

    const lane = (row) => {
      const { start, end, names, lost } = row.lane, first = above(end, from);
      const at = (i) => [start[i], end[i]], y = row.y + 1, size = ROW - 3;
      const colourOf = (i) => colours[KINDS[row.rank.work[names[i]]]];
      const label = (i) => row.rank.names[names[i]];
      const ink = (i) => [OTHER, COPY].includes(row.rank.work[names[i]]) ? colours.ink : colours.on;
      const hit = (colour) => (i) => !row.hits || row.hits[names[i]] ? colour(i) : null;
      pen.fillStyle = colours.wash;
      pen.fillRect(GUTTER, y, room, size);
      pen.globalAlpha = row.hits ? 0.2 : 1;
      boxes(start.length, at, first, colourOf, y, size);
      boxes(lost.length, (i) => lost[i], 0, () => colours.lost, y, size);
      const { late } = row.rank;
      if (names.length && row.rank.work[names[0]] < COMMUNICATION)
        boxes(late.length, (i) => late[i], 0, () => colours.lost, y + size - 4, 4);
      pen.globalAlpha = 1;
      if (row.hits) boxes(start.length, at, first, hit(() => colours.match), y, size, 1);
      labels(start.length, at, first, hit(row.hits ? () => colours.on : ink), y, size, label);
    };

    const axis = () => {
      const rough = (to - from) / Math.max(2, room / 90), power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
      const [unit, size] = step < 1e3 ? ["ns", 1] : step < 1e6 ? ["µs", 1e3] : ["ms", 1e6];
      for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
        pen.fillStyle = colours.line;
        pen.fillRect(x(at), AXIS - 4, 1, height - AXIS);
        const words = `${+(at / size).toPrecision(6)} ${unit}`;
        if (x(at) + pen.measureText(words).width < GUTTER + room + 8)
          text(words, x(at), AXIS / 2, 200, colours.soft);
      }
    };

    const draw = () => {
      waiting = false;
      const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
      if (!width) return;
      room = width - GUTTER - 8;
      canvas.style.height = `${height}px`;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      pen.scale(ratio, ratio);
      pen.font = FONT;
      pen.textBaseline = "middle";
      const style = getComputedStyle(box);
      for (const name of [...KINDS, "lost", "match", "wash", "line", "ink", "soft", "on", "forward",
        "backward", "optimizer"]) colours[name] = style.getPropertyValue(`--${name}`);
      axis();
      for (const row of rows) {
        const middle = row.y + row.size / 2;
        if (row.title) {
          pen.font = `600 ${FONT}`;
          const used = Math.min(pen.measureText(row.title).width, width - 130);
          text(row.title, 2, middle, used + 1, colours.ink);
          pen.font = FONT;
          text(row.facts, used + 12, middle, width - used - 14, colours.soft);
        } else if (row.lane) {
          text(row.lane.name, 2, middle, GUTTER - 6, colours.soft);
          lane(row);
        } else {
          const { phases } = row, at = (i) => phases[i].slice(1), y = row.y + 2;
          const colourOf = (i) => colours[phases[i][0]] || colours.wash;
          boxes(phases.length, at, 0, colourOf, y, ROW - 4);
          labels(phases.length, at, 0, () => colours.ink, y, ROW - 4, (i) => phases[i][0]);
        }
      }
      say();
    };

    const say = () => {
      canvas.dataset.from = from;
      canvas.dataset.to = to;
      canvas.dataset.matches = found.length;
      const total = found.reduce((sum, [a, b]) => sum + b - a, 0);
      const hits = search.value.trim() ? ` ${found.length} spans match, ${time(total)} together.` +
        (found.length ? " Enter: next." : "") : "";
      status.textContent = `${time(from)} to ${time(to)} of ${time(whole)}.${hits}`;
      list();
    };

    // The table below the canvas: time and runs of each name in the visible range.
    const list = () => {
      if (!find("details").open) return;
      const picked = chosen.map((each) => each.value);
      const sums = new Map();
      for (const { name, rank } of shown())
        for (const { start, end, names } of rank.lanes)
          for (let i = above(end, from); i < start.length && start[i] < to; i++) {
            const key = rank.names[names[i]];
            if (!sums.has(key)) sums.set(key, [0, 0, 0, 0]);
            const sum = sums.get(key), side = 2 * (name === picked[1] && name !== picked[0]);
            sum[side] += Math.min(end[i], to) - Math.max(start[i], from);
            sum[side + 1] += 1;
          }
      const most = ([, sum]) => Math.max(sum[0], sum[2]);
      const lead = [...sums].sort((a, b) => most(b) - most(a)).slice(0, LISTED);
      body.replaceChildren(...lead.map(([name, sum]) => {
        const line = document.createElement("tr");
        const cells = [name, ms(sum[0]), sum[1], ms(sum[2]), sum[3]];
        for (const value of picked[1] ? cells : cells.slice(0, 3))
          line.appendChild(document.createElement("td")).textContent = value;
        return line;
      }));
    };

    const hover = (event) => {
      const at = from + (event.offsetX - GUTTER) / room * (to - from);
      const row = rows.find(({ y, size }) => event.offsetY >= y && event.offsetY < y + size);
      let words = "";
      if (row?.lane && event.offsetX >= GUTTER) {
        const { start, end, names, name } = row.lane, near = 2 * (to - from) / room;
        const i = above(end, at - near);
        if (i < start.length && start[i] <= at + near)
          words = `${row.rank.names[names[i]]}\n${time(end[i] - start[i])}, from ${time(start[i])}` +
            ` on ${name}`;
      } else if (row?.phases) {
        const phase = row.phases.find(([, a, b]) => a <= at && at < b);
        if (phase) words = `${phase[0]}\n${time(phase[2] - phase[1])}`;
      }
      tip.hidden = !words;
      tip.textContent = words;
      tip.style.left = `${Math.min(event.offsetX + 10, canvas.clientWidth - tip.offsetWidth)}px`;
      tip.style.top = `${event.offsetY + 16}px`;
    };

    const again = () => { arrange(); show(0, whole); };
    for (const each of chosen) each.addEventListener("change", again);
    every.addEventListener("change", again);
    search.addEventListener("input", () => { match(); later(); });
    search.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !found.length) return;
      event.preventDefault();
      const [a, b] = found[next++ % found.length];
      const half = Math.max(Math.min((to - from) / 2, 50 * (b - a)), b - a);
      show((a + b) / 2 - half, (a + b) / 2 + half);
    });
    const ACTS = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), Home: () => show(0, whole),
      0: () => show(0, whole) };
    canvas.addEventListener("keydown", (event) => {
      if (!ACTS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      ACTS[event.key]();
    });
    for (const button of box.querySelectorAll("button"))
      button.addEventListener("click", ACTS[button.value]);
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== canvas) return;  // the page scrolls
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, from + (event.offsetX - GUTTER) / room * (to - from));
    }, { passive: false });
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held === null) return hover(event);
      pan((held - event.offsetX) / room);
      held = event.offsetX;
    });
    for (const name of ["pointerup", "pointercancel"])
      canvas.addEventListener(name, () => { held = null; });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    find("details").addEventListener("toggle", list);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
    again();
    new ResizeObserver(later).observe(canvas);
  };

  for (const box of document.querySelectorAll(".timeline")) start(box);
})();
