import { useLayoutEffect, useRef } from "preact/hooks";
import { type Key, useText } from "../i18n";

const KEYS: [string[], Key][] = [
  [["g u"], "runs"],
  [["g o"], "overview"],
  [["[", "]"], "keyStep"],
  [["g s"], "step"],
  [["{", "}"], "keyEnds"],
  [["g r"], "responses"],
  [["j", "k"], "keyRows"],
  [["a", "b"], "keySides"],
  [["g q"], "prompt"],
  [["g t"], "tokens"],
  [["Enter"], "keyOpen"],
  [["g p"], "patterns"],
  [["s"], "keyStar"],
  [["r 1–5"], "keyRate"],
  [["t", "m"], "keyLabel"],
  [["g c"], "compare"],
  [["/"], "keySearch"],
  [["1–9"], "keyMetric"],
  [["g e"], "settings"],
  [["g l"], "sql"],
  [["Ctrl Enter"], "keyRun"],
  [["←", "→"], "keyToken"],
  [["n", "p"], "keyTurn"],
  [["d"], "keyTheme"],
  [["?"], "keyHelp"],
];

/** The browser keeps the focus inside while it is open, and gives it back afterwards. */
export function Help({ onClose }: { onClose: () => void }) {
  const t = useText();
  const box = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    const dialog = box.current!;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  return (
    <dialog
      ref={box}
      class="dialog"
      aria-label={t("keys")}
      onCancel={onClose}
      onClick={(event) => event.target === box.current && onClose()}
    >
      <div>
        <header>
          <h2>{t("keys")}</h2>
          <button type="button" onClick={onClose}>
            {t("close")}
          </button>
        </header>
        <dl>
          {KEYS.flatMap(([keys, text]) => [
            <dt key={keys.join()}>
              {keys.map((key) => (
                <>
                  <kbd>{key}</kbd>{" "}
                </>
              ))}
            </dt>,
            <dd key={text}>{t(text)}</dd>,
          ])}
        </dl>
      </div>
    </dialog>
  );
}
