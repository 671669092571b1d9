// Browsers start no worker for a page that lies on a disk. This one runs in a frame, so the search needs no server.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.inside = new Promise((ready) => {
        frame.onload = () => {
          const inner = frame.contentWindow;
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inner.document.createElement("script");
          script.src = new URL(address, location.href);
          script.onload = () => ready(inner);
          inner.document.head.append(script);
        };
      });
      document.documentElement.append(frame);
    }

    postMessage(data) {
      this.inside.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
  };
}
