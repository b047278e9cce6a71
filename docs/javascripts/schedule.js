// A schedule at work, a moment at a time: `<div class="schedule">` with a list of moments in it,
// as docs/pictures/draw.py writes them, becomes a row of steps and a slider over the moments.
document.addEventListener("DOMContentLoaded", () => {
  for (const figure of document.querySelectorAll(".schedule")) {
    const { units, moments } = JSON.parse(figure.querySelector("script").textContent);
    const row = document.createElement("div");
    row.className = "schedule-row";
    row.setAttribute("aria-hidden", "true");
    const cells = Array.from({ length: units }, (_, unit) => {
      const cell = document.createElement("span");
      cell.textContent = unit;
      row.append(cell);
      return cell;
    });
    const label = document.createElement("label");
    const slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 0, max: moments.length - 1, value: 0 });
    const told = document.createElement("output");
    label.append("Moment ", slider);
    figure.append(row, label, told);
    const show = () => {
      const moment = moments[slider.value];
      cells.forEach((cell, unit) => {
        const marks = [];
        if (moment.kept.includes(unit)) marks.push("kept");
        if (unit >= moment.reversed) marks.push("reversed");
        if (moment.at.includes(unit)) marks.push(moment.does);
        cell.className = marks.join(" ");
      });
      told.textContent = `${Number(slider.value) + 1} of ${moments.length}: ${moment.says}`;
      slider.setAttribute("aria-valuetext", moment.says);
    };
    slider.addEventListener("input", show);
    show();
  }
});
