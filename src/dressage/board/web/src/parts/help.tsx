import { type Key, useText } from "../i18n";

const KEYS: [string[], Key][] = [
  [["g o"], "overview"],
  [["[", "]"], "keyStep"],
  [["g s"], "step"],
  [["{", "}"], "keyEnds"],
  [["g r"], "responses"],
  [["j", "k"], "keyRows"],
  [["g t"], "tokens"],
  [["Enter"], "keyOpen"],
  [["g p"], "patterns"],
  [["s"], "keyStar"],
  [["g c"], "compare"],
  [["/"], "keySearch"],
  [["1–9"], "keyMetric"],
  [["←", "→"], "keyToken"],
  [["d"], "keyTheme"],
  [["?"], "keyHelp"],
];

export function Help({ onClose }: { onClose: () => void }) {
  const t = useText();
  return (
    <div class="cover" onClick={onClose}>
      <div
        class="dialog"
        role="dialog"
        aria-modal="true"
        aria-label={t("keys")}
        onClick={(event) => event.stopPropagation()}
      >
        <header>
          <h2>{t("keys")}</h2>
          <button type="button" onClick={onClose} autofocus>
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
    </div>
  );
}
