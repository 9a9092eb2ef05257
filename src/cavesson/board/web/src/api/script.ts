/** Loads the parts of the page that its first view does not need, each of which is a script. */

/** Whether a script could be loaded. */
export function loadScript(name: string): Promise<boolean> {
  return new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = name;
    script.onload = () => resolve(true);
    script.onerror = () => {
      script.remove();
      resolve(false);
    };
    document.head.append(script);
  });
}
