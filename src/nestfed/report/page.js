"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.documentElement.classList.remove("plain");

  // ------------------------------------------------------------------------------------------- elements and words

  const SVG = "http://www.w3.org/2000/svg";
  const fill = (element, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") element.textContent = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };
  const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

  const minus = (text) => text.replace(/-/g, "−");
  const number = (value, digits) => {
    const size = Math.abs(value);
    const odd = size !== 0 && (size < 0.5 * 10 ** -digits || size >= 1e6);
    return minus(odd ? value.toPrecision(3) : value.toFixed(digits));
  };
  const spread = (mean, std, digits) => number(mean, digits) + (std == null ? "" : ` ± ${number(std, digits)}`);
  const amount = (size, unit = "") => {
    for (const [factor, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(size) >= 0.9995 * factor) return `${Number((size / factor).toPrecision(3))} ${prefix}${unit}`;
    }
    return `${Number(size.toPrecision(3))} ${unit}`.trim();
  };
  const along = (axis, value) => (axis === "round" ? `${Math.round(value)}` : amount(value, axis === "bytes" ? "B" : ""));

  const choices = (select, options, chosen) => {
    select.replaceChildren(...options.map(([value, text]) => html("option", { value, text })));
    if (options.some(([value]) => value === chosen)) select.value = chosen;
    return select.value;
  };

  // ------------------------------------------------------------------------------------------- axes

  const ticks = (low, high, count) => {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const places = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) places.push(i * step);
    return { places, digits };
  };
  const powers = (low, high) => {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const every = Math.ceil((last - first) / 6);
    const factors = last - first > 2 ? [1] : [1, 2, 5];
    const places = [];
    for (let power = first; power <= last; power += every) {
      for (const factor of factors) {
        const place = factor * 10 ** power;
        if (place >= low * 0.999 && place <= high * 1.001) places.push(place);
      }
    }
    return places.length > 2 ? places : ticks(low, high, 5).places;
  };
  const plainly = (value, digits) => {
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e5 || size < 1e-4)) return minus(value.toExponential(0).replace("e+", "e"));
    return minus(value.toFixed(digits));
  };

  // Draws grid and numbers; returns the two scales.
  const axes = (picture, box, across, upwards) => {
    const logarithmic = upwards.logarithmic;
    const bend = logarithmic ? Math.log10 : (value) => value;
    const X = (value) => box.left + ((value - across.low) / (across.high - across.low)) * (box.right - box.left);
    const Y = (value) =>
      box.bottom - ((bend(value) - bend(upwards.low)) / (bend(upwards.high) - bend(upwards.low))) * (box.bottom - box.top);
    const vertical = logarithmic ? { places: powers(upwards.low, upwards.high) } : ticks(upwards.low, upwards.high, 5);
    for (const place of vertical.places) {
      const y = Y(place);
      const text = logarithmic ? minus(String(Number(place.toPrecision(3)))) : plainly(place, vertical.digits);
      picture.append(
        svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }),
        svg("text", { x: box.left - 8, y: y + 4, "text-anchor": "end", text }),
      );
    }
    const horizontal = ticks(across.low, across.high, Math.max(3, Math.min(7, (box.right - box.left) / 110)));
    for (const place of horizontal.places) {
      if (across.whole && place % 1) continue;
      const x = X(place), text = across.text ? across.text(place) : plainly(place, horizontal.digits);
      picture.append(svg("text", { x, y: box.bottom + 18, "text-anchor": x > box.right - 24 ? "end" : "middle", text }));
      if (across.grid) picture.append(svg("line", { class: "grid", x1: x, x2: x, y1: box.top, y2: box.bottom }));
    }
    picture.append(svg("text", { x: box.right, y: box.bottom + 38, "text-anchor": "end", text: across.title }));
    return { X, Y };
  };

  // A picture that is drawn again when its place changes width: text keeps its size on a phone.
  const plot = (place, height, draw) => {
    let width = 0;
    const redraw = () => {
      const picture = svg("svg", { height, width, viewBox: `0 0 ${width} ${height}` });
      place.querySelector("svg")?.remove();
      place.prepend(picture);
      draw(picture, width, height);
    };
    new ResizeObserver(() => {
      const now = Math.floor(place.clientWidth);
      if (now && now !== width) {
        width = now;
        redraw();
      }
    }).observe(place);
    return () => width && redraw();
  };

  // ------------------------------------------------------------------------------------------- curves

  const curves = (section) => {
    const place = section.querySelector(".plot"), legend = section.querySelector(".legend");
    const metricSelect = section.querySelector("[data-role=metric]"), logBox = section.querySelector("[data-role=log]");
    const spoken = section.querySelector("[data-role=spoken]");
    const hidden = new Set();
    const readout = html("div", { class: "readout", hidden: "" });
    place.append(readout);
    let drawn = null; // what the read-out needs of the last drawing
    let at = null; // where the read-out stands, in units of the x axis

    const axis = () => section.querySelector("input[name=axis]:checked").value;
    const metric = () => data.metrics.find((entry) => entry.name === metricSelect.value);
    const lines = () =>
      data.methods.flatMap((method) => {
        const own = data.curves[method.key], line = own.lines[metricSelect.value];
        if (!line || hidden.has(method.key)) return [];
        const grid = own.grids[line.grid];
        return [{ method, x: grid[axis()], stage: grid.stage, changes: grid.changes[axis()], mean: line.mean, std: line.std }];
      });

    const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    // Pieces without a gap: a stage that lacks the metric is not drawn over, nor is a value that has no logarithm.
    const pieces = (line, seen) => {
      const result = [];
      let piece = [];
      line.mean.forEach((value, i) => {
        const gap = i && line.stage[i] - line.stage[i - 1] > 1;
        if ((gap || !seen(value)) && piece.length) {
          result.push(piece);
          piece = [];
        }
        if (seen(value)) piece.push(i);
      });
      return piece.length ? [...result, piece] : result;
    };

    const redraw = plot(place, 380, (picture, width, height) => {
      const shown = lines(), logarithmic = logBox.checked;
      const seen = (value) => value != null && (!logarithmic || value > 0);
      const ends = shown.flatMap((line) =>
        line.mean.flatMap((mean, i) => {
          const std = line.std?.[i] ?? 0;
          return [mean, mean - std, mean + std].filter(seen);
        }),
      );
      drawn = null;
      readout.hidden = true;
      if (!ends.length) {
        const text = shown.length ? "No positive value: no logarithm." : "Every method is hidden.";
        picture.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle", text }));
        return;
      }
      let low = ends.reduce((a, b) => Math.min(a, b)), high = ends.reduce((a, b) => Math.max(a, b));
      if (logarithmic) {
        // A band may reach down to nearly zero: the means decide where the axis begins.
        const means = shown.flatMap((line) => line.mean.filter(seen));
        low = Math.max(low, means.reduce((a, b) => Math.min(a, b)) / 3);
        [low, high] = [low / 1.05, high * 1.05];
      } else {
        const room = (high - low || Math.abs(high) || 1) * 0.04;
        [low, high] = [low - room, high + room];
      }
      const first = Math.min(...shown.map((line) => line.x[0]));
      const last = Math.max(...shown.map((line) => line.x[line.x.length - 1]));
      const box = { left: 54, right: width - 6, top: 14, bottom: height - 46 };
      const { X, Y } = axes(
        picture, box,
        { low: first, high: last > first ? last : first + 1, title: data.axes[axis()], text: (v) => along(axis(), v), whole: axis() === "round" },
        { low, high, logarithmic },
      );
      const floor = (value) => Math.min(Y(seen(value) ? Math.max(value, low) : low), box.bottom);
      for (const line of shown) {
        for (const [x, name] of line.changes) {
          picture.append(
            svg("line", { class: "stage", x1: X(x), x2: X(x), y1: box.top, y2: box.bottom, stroke: line.method.colour, "stroke-dasharray": "4 4" }),
            svg("text", { x: X(x) + (X(x) > width - 110 ? -5 : 5), y: box.top + 2, "text-anchor": X(x) > width - 110 ? "end" : "start", text: name }),
          );
        }
      }
      for (const line of shown) {
        if (!line.std) continue;
        for (const piece of pieces(line, seen)) {
          const top = piece.map((i) => [X(line.x[i]), floor(line.mean[i] + line.std[i])]);
          const bottom = piece.map((i) => [X(line.x[i]), floor(line.mean[i] - line.std[i])]).reverse();
          picture.append(svg("path", { class: "band", d: `${path([...top, ...bottom])}Z`, fill: line.method.colour, opacity: 0.18 }));
        }
      }
      for (const line of shown) {
        for (const piece of pieces(line, seen)) {
          const points = piece.map((i) => [X(line.x[i]), Y(line.mean[i])]);
          picture.append(
            points.length > 1
              ? svg("path", {
                  class: "line", "data-method": line.method.key, d: path(points), fill: "none", stroke: line.method.colour,
                  "stroke-width": 2.2, "stroke-linejoin": "round", "stroke-dasharray": line.method.dash.join(" "),
                })
              : svg("circle", { class: "line", "data-method": line.method.key, cx: points[0][0], cy: points[0][1], r: 4, fill: line.method.colour }),
          );
        }
      }
      const cursor = svg("g", {});
      picture.append(cursor);
      drawn = { shown, X, Y, box, low: first, high: last, seen, cursor };
      if (at != null) read(at);
    });

    const nearest = (xs, value) => {
      let low = 0, high = xs.length - 1;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (xs[middle] <= value) low = middle;
        else high = middle;
      }
      return value - xs[low] <= xs[high] - value ? low : high;
    };

    function read(value) {
      if (!drawn) return;
      const { shown, X, Y, box, cursor } = drawn;
      at = Math.min(Math.max(value, drawn.low), drawn.high);
      const reach = (drawn.high - drawn.low) * 0.02;
      const found = shown.flatMap((line) => {
        const i = nearest(line.x, at);
        const inside = at >= line.x[0] - reach && at <= line.x[line.x.length - 1] + reach;
        return inside && drawn.seen(line.mean[i]) ? [{ line, i, mean: line.mean[i], x: line.x[i] }] : [];
      });
      const digits = metric().digits, where = `${{ round: "round", bytes: "", oracle_calls: "" }[axis()]} ${along(axis(), at)}`.trim();
      found.sort((a, b) => b.mean - a.mean);
      cursor.replaceChildren(
        svg("line", { class: "cursor", x1: X(at), x2: X(at), y1: box.top, y2: box.bottom }),
        ...found.map(({ line, mean, x }) =>
          svg("circle", { cx: X(x), cy: Y(mean), r: 4.5, fill: line.method.colour, stroke: "var(--surface)", "stroke-width": 1.5 }),
        ),
      );
      readout.replaceChildren(
        html("p", { text: axis() === "oracle_calls" ? `${where} calls` : where }),
        ...found.map(({ line, i, mean }) =>
          html(
            "p", {}, html("span", { class: "swatch", style: `background:${line.method.colour}` }),
            html("span", { text: line.method.title }), html("b", { text: spread(mean, line.std?.[i], digits) }),
          ),
        ),
      );
      readout.hidden = false;
      const room = place.clientWidth - readout.offsetWidth;
      const left = X(at) + 14 <= room ? X(at) + 14 : X(at) - 14 - readout.offsetWidth;
      readout.style.left = `${Math.min(Math.max(left, 0), Math.max(room, 0))}px`;
      return `${where}: ${found.map(({ line, mean }) => `${line.method.title} ${number(mean, digits)}`).join(", ")}`;
    }
    const leave = () => {
      at = null;
      readout.hidden = true;
      drawn?.cursor.replaceChildren();
    };
    const follow = (event) => {
      if (!drawn) return;
      const x = event.clientX - place.getBoundingClientRect().left;
      read(drawn.low + ((x - drawn.box.left) / (drawn.box.right - drawn.box.left)) * (drawn.high - drawn.low));
    };
    place.addEventListener("pointermove", follow);
    place.addEventListener("pointerdown", follow);
    place.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
    place.addEventListener("blur", leave);
    place.addEventListener("keydown", (event) => {
      if (!drawn) return;
      if (event.key === "Escape") return leave();
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const from = at ?? (step > 0 ? drawn.low : drawn.high);
      spoken.textContent = read(at == null ? from : from + (step * (drawn.high - drawn.low)) / 50);
    });

    for (const method of data.methods) {
      if (!Object.keys(data.curves[method.key].lines).length) continue;
      const sample = svg("svg", { width: 22, height: 12, "aria-hidden": "true" },
        svg("line", { x1: 1, x2: 21, y1: 6, y2: 6, stroke: method.colour, "stroke-width": 3.5, "stroke-dasharray": method.dash.join(" ") }));
      const button = html("button", { type: "button", "aria-pressed": "true", "data-method": method.key }, sample, html("span", { text: method.title }));
      button.addEventListener("click", () => {
        const show = hidden.delete(method.key);
        if (!show) hidden.add(method.key);
        button.setAttribute("aria-pressed", String(show));
        redraw();
      });
      legend.append(button);
    }
    choices(metricSelect, data.metrics.map(({ name, title }) => [name, title]));
    section.querySelector(".controls").addEventListener("change", () => {
      at = null;
      redraw();
    });
  };

  // ------------------------------------------------------------------------------------------- bars

  const bars = (section) => {
    const place = section.querySelector(".bars");
    const [metric, kind, split] = ["metric", "kind", "split"].map((role) => section.querySelector(`[data-role=${role}]`));
    const MANY = 24;
    const different = (entries, key, title = key) => [...new Map(entries.map((entry) => [entry[key], entry[title]]))];

    const row = (method, track, mean, std, digits) =>
      html(
        "div", { class: "row" }, html("span", { text: method.title, title: method.title }), track,
        html("span", { text: mean == null ? "–" : number(mean, digits) },
          ...(std == null ? [] : [html("span", { class: "deviation", text: ` ± ${number(std, digits)}` })])),
      );
    const scale = (low, high, at) => {
      const { places, digits } = ticks(low, high, 4);
      const marks = places.map((value) => html("span", { text: plainly(value, digits), style: `left:${at(value)}%` }));
      return html("div", { class: "row" }, html("span"), html("div", { class: "scale" }, ...marks), html("span"));
    };
    const asBars = (chosen, methods, low, high, at) =>
      chosen.names.map((name, i) =>
        html(
          "div", {}, html("h4", { text: name }),
          ...methods.map((method) => {
            const mean = chosen.mean[method.key][i], std = chosen.std?.[method.key]?.[i];
            const track = html("div", { class: "track" });
            if (mean != null) {
              const [from, to] = [Math.min(0, mean), Math.max(0, mean)].map(at);
              track.append(html("i", { class: "bar", style: `left:${from}%;width:${to - from}%;background:${method.colour}` }));
              if (std != null) track.append(html("i", { class: "whisker", style: `left:${at(mean - std)}%;width:${at(mean + std) - at(mean - std)}%` }));
            }
            return row(method, track, mean, std, chosen.digits);
          }),
        ),
      );
    const asDots = (chosen, methods, at) => [
      html(
        "div", {},
        ...methods.map((method) => {
          const values = chosen.mean[method.key], known = values.filter((value) => value != null);
          const mean = known.length ? known.reduce((a, b) => a + b) / known.length : null;
          const dots = values.flatMap((value, i) => {
            if (value == null) return [];
            const top = 14 + 72 * ((i * 0.618034) % 1);
            const title = `${chosen.names[i]}: ${number(value, chosen.digits)}`;
            return [html("i", { class: "point", title, style: `left:${at(value)}%;top:${top}%;background:${method.colour}` })];
          });
          const middle = mean == null ? [] : [html("i", { class: "middle", style: `left:${at(mean)}%;background:${method.colour}` })];
          const entry = row(method, html("div", { class: "track tall" }, ...dots, ...middle), mean, null, chosen.digits);
          entry.style.marginBottom = "6px";
          return entry;
        }),
      ),
    ];

    const redraw = () => {
      choices(metric, different(data.slices, "metric", "title"), metric.value);
      const ofMetric = data.slices.filter((entry) => entry.metric === metric.value);
      choices(kind, different(ofMetric, "kind"), kind.value);
      const ofKind = ofMetric.filter((entry) => entry.kind === kind.value);
      choices(split, different(ofKind, "split"), split.value || "test");
      const chosen = ofKind.find((entry) => entry.split === split.value);
      const methods = data.methods.filter((method) => chosen.mean[method.key]);
      const many = chosen.names.length > MANY;
      const ends = methods.flatMap((method) =>
        chosen.mean[method.key].flatMap((mean, i) => {
          const std = many ? 0 : (chosen.std?.[method.key]?.[i] ?? 0);
          return mean == null ? [] : [mean - std, mean + std];
        }),
      );
      // Bars begin at zero; dots need not.
      let low = ends.reduce((a, b) => Math.min(a, b), many ? Infinity : 0), high = ends.reduce((a, b) => Math.max(a, b), many ? -Infinity : 0);
      if (low >= 0 && high <= 1 && high > 0.5 && !many) high = 1;
      const room = many ? (high - low || 1) * 0.03 : 0;
      [low, high] = [low - room, high + room || 1];
      const at = (value) => (100 * (value - low)) / (high - low);
      place.replaceChildren(...(many ? asDots(chosen, methods, at) : asBars(chosen, methods, low, high, at)), scale(low, high, at));
      // All tracks are equally long, whatever the widths of the numbers beside them.
      const widest = Math.max(...[...place.querySelectorAll(".row > :last-child")].map((cell) => cell.offsetWidth));
      place.querySelectorAll(".row > :last-child").forEach((cell) => (cell.style.minWidth = `${widest}px`));
    };
    section.addEventListener("change", redraw);
    redraw();
  };

  // ------------------------------------------------------------------------------------------- trade-off

  const tradeOff = (section) => {
    const [across, upwards] = ["across", "upwards"].map((role) => section.querySelector(`[data-role=${role}]`));
    const options = data.headline.map(({ name, title }) => [name, title]);
    choices(upwards, options, options[0][0]);
    choices(across, options, options[1][0]);
    const redraw = plot(section.querySelector(".plot"), 340, (picture, width, height) => {
      const [x, y] = [across, upwards].map((select) => data.headline.find(({ name }) => name === select.value));
      const points = data.methods.filter(({ key }) => x.values[key] && y.values[key]);
      if (!points.length) return;
      const range = (metric) => {
        const ends = points.flatMap(({ key }) => [-1, 1].map((side) => metric.values[key].mean + side * (metric.values[key].std ?? 0)));
        const low = Math.min(...ends), high = Math.max(...ends), room = (high - low || Math.abs(high) || 1) * 0.12;
        return { low: low - room, high: high + room };
      };
      const box = { left: 54, right: width - 6, top: 30, bottom: height - 46 };
      const named = (metric) => `${metric.title} (${metric.better} is better)`;
      const { X, Y } = axes(picture, box, { ...range(x), title: `${named(x)} →`, grid: true }, range(y));
      picture.append(svg("text", { x: 0, y: 12, text: `↑ ${named(y)}` }));
      const right = x.better === "higher", high = y.better === "higher";
      const corner = { x: right ? box.right - 6 : box.left + 6, y: high ? box.top + 14 : box.bottom - 8 };
      picture.append(
        svg("text", {
          class: "corner", ...corner,
          "text-anchor": right ? "end" : "start", text: right ? `better ${high ? "↗" : "↘"}` : `${high ? "↖" : "↙"} better`,
        }),
      );
      // Left, right and height of what is already written: at first the word in the corner.
      const names = [[corner.x - (right ? 56 : 0), corner.x + (right ? 0 : 56), corner.y]];
      for (const { key, title, colour } of points) {
        const [h, v] = [x.values[key], y.values[key]];
        const [cx, cy] = [X(h.mean), Y(v.mean)];
        if (h.std != null) picture.append(svg("line", { x1: X(h.mean - h.std), x2: X(h.mean + h.std), y1: cy, y2: cy, stroke: colour, "stroke-width": 1.5 }));
        if (v.std != null) picture.append(svg("line", { y1: Y(v.mean - v.std), y2: Y(v.mean + v.std), x1: cx, x2: cx, stroke: colour, "stroke-width": 1.5 }));
        // The first corner beside the point that is free of other names and inside the picture.
        const length = 7.6 * title.length;
        const corners = [[10, -9], [10, 19], [-10 - length, -9], [-10 - length, 19]].map(([dx, dy]) => [cx + dx, cy + dy]);
        const free = ([left, y]) =>
          left > box.left && left + length < width && names.every(([l, r, h]) => left > r || left + length < l || Math.abs(y - h) > 14);
        const [left, up] = corners.find(free) ?? corners[cx > width / 2 ? 2 : 0];
        names.push([left, left + length, up]);
        const before = left < cx;
        picture.append(
          svg("circle", { cx, cy, r: 6, fill: colour, stroke: "var(--surface)", "stroke-width": 2 }),
          svg("text", { class: "name", x: cx + (before ? -10 : 10), y: up, "text-anchor": before ? "end" : "start", text: title }),
        );
      }
    });
    section.addEventListener("change", redraw);
  };

  const begin = (id, start, ready) => {
    const section = document.getElementById(id);
    if (section && ready) start(section);
    else section?.querySelectorAll(".script-only").forEach((element) => element.remove());
  };
  begin("trade-off", tradeOff, data.headline.length > 1);
  begin("curves", curves, data.metrics.length);
  begin("parts", bars, data.slices.length);
})();
