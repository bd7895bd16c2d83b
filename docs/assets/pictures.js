// Pictures follow the site's switch between light and dark, not the system's alone.
const follow = () =>
  document.querySelectorAll("picture source").forEach((each) => {
    each.media = document.body.dataset.mdColorScheme === "slate" ? "all" : "not all";
  });
new MutationObserver(follow).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
follow();
