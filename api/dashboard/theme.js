// Sets the colours that were chosen before the page is drawn, so that it does not flash. The button is in app.js.
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("trunkline.theme");
  } catch {
    // Storage may be forbidden: then it is as the system has it.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
