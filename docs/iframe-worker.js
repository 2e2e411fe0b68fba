// Search of pages opened from the disk: browsers start no workers there, so a worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const { contentWindow: inside, contentDocument: page } = this.frame;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      const script = page.createElement("script");
      this.ready = new Promise((resolve) => { script.onload = resolve; });
      script.src = new URL(url, location.href);
      page.head.append(script);
      this.inside = inside;
    }

    postMessage(data) {
      this.ready = this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
