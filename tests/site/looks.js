// What is hard to see on the page at hand: a list of texts.
() => {
  const told = [];
  const parts = (color) => color.match(/[\d.]+/g).map(Number);
  const over = (front, back) => {
    const alpha = front[3] ?? 1;
    return [0, 1, 2].map((i) => alpha * front[i] + (1 - alpha) * back[i]);
  };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const color = parts(getComputedStyle(at).backgroundColor);
      layers.push(color);
      if ((color[3] ?? 1) === 1) break;
    }
    return layers.reverse().reduce((back, front) => over(front, back), [255, 255, 255]);
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((c) => {
      const s = c / 255;
      return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  };
  const faint = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    if (!text || element.closest("script, style, noscript, template, .headerlink, .md-search, .md-source")) continue;
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (box.width < 2 || box.right < 0 || box.left > innerWidth) continue;
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const back = behind(element);
    const ratio = contrast(over(parts(style.color), back), back);
    const where = `${element.tagName.toLowerCase()}.${element.className}`;
    if (ratio < (large ? 3 : 4.5) && !faint.has(where)) {
      faint.set(where, `contrast ${ratio.toFixed(2)} of "${text.slice(0, 30)}" (${where})`);
    }
    if (size < 11 && !faint.has(`${where} size`)) {
      faint.set(`${where} size`, `${size} px: "${text.slice(0, 30)}" (${where})`);
    }
  }
  told.push(...faint.values());
  for (const image of document.querySelectorAll("article img")) {
    if (!image.alt.trim()) told.push(`no alternative text: ${image.src}`);
    if (!image.checkVisibility()) continue;
    if (!image.naturalWidth) told.push(`no picture: ${image.src}`);
    const small = image.src.includes(".svg") && image.width < 0.75 * image.naturalWidth;
    if (small) told.push(`${image.width} of ${image.naturalWidth} px: ${image.src}`);
  }
  const wide = document.scrollingElement.scrollWidth;
  if (wide > innerWidth) told.push(`${wide} px wide, of ${innerWidth}`);
  if (document.querySelectorAll("h1").length !== 1) told.push("not one h1");
  let level = 1;
  for (const heading of document.querySelectorAll("article :is(h1, h2, h3, h4, h5)")) {
    const next = Number(heading.tagName[1]);
    if (next > level + 1) told.push(`h${next} after h${level}: ${heading.textContent}`);
    level = next;
  }
  return told;
}
