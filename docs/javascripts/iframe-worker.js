// The search runs in a worker, which a browser refuses to a page that is opened as a file. There, a hidden frame takes
// its place. (The generator would fetch such a script from a CDN; a polyfill of this name keeps it from doing so.)
if (location.protocol === "file:") {
  window.Worker = class {
    onmessage = null;
    onerror = null;

    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = (data) => this.onmessage?.(new MessageEvent("message", { data: structuredClone(data) }));
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      script.onerror = () => this.onerror?.(new Event("error"));
      this.inside.document.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
