// The theme searches in a worker, and browsers refuse workers to a page that was opened from a
// folder. There a hidden frame stands in for the worker. Its name is how the theme's offline plug-in
// sees that it need not load such a script from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>"
      this.inside = new Promise((resolve, reject) => {
        frame.addEventListener("load", async () => {
          const inside = frame.contentWindow
          const load = address => new Promise((done, failed) => {
            const script = inside.document.createElement("script")
            script.src = address
            script.onload = done
            script.onerror = () => failed(new Error(`cannot load ${address}`))
            inside.document.head.append(script)
          })
          // What a worker's global scope has and a window has not, or has with another meaning.
          inside.importScripts = async (...addresses) => {
            for (const address of addresses) await load(address)
          }
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          await load(url).then(() => resolve(inside), reject)
        }, { once: true })
      })
      document.body.append(frame)
    }

    async postMessage(data) {
      const inside = await this.inside
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
  }
}
