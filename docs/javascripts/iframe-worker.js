/* Search from the disk. A browser starts no worker from a file, so the script of a worker runs in a hidden frame instead. The theme's
   search looks for the name IFrameWorker, and its plugin `offline` for the name of this file: otherwise it loads one from elsewhere. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((started, failed) => {
        this.frame.onload = () => {
          this.frame.onload = null;
          const { contentWindow: inside, contentDocument: page } = this.frame;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = page.createElement("script");
          Object.assign(script, { src: url, onload: () => started(inside), onerror: failed });
          page.body.append(script);
        };
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
