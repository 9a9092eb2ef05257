/** The settings in which runs differ; the others when asked for. */

import { address } from "../api/client";
import { useResource } from "../api/resource";
import { useText } from "../i18n";
import { whole } from "../maths/format";
import { compared } from "../maths/settings";
import type { Side } from "../maths/sides";
import { runs } from "../state/board";
import { patchRoute, useRoute } from "../state/router";
import { useStore } from "../state/store";
import { Card } from "./card";
import { Link } from "./link";
import { SaveTable } from "./save-table";

/** Runs load one hook each, so another number of them is another component. */
export function ComparedSettings({ sides }: { sides: Side[] }) {
  const wanted = [...new Set(sides.map(({ run }) => run))];
  return wanted.length > 1 ? <Loaded key={wanted.join()} wanted={wanted} /> : null;
}

function Loaded({ wanted }: { wanted: string[] }) {
  const t = useText();
  const all = useStore(runs)!;
  const { query } = useRoute();
  const infos = wanted.map((run) => useResource<unknown>(address(`runs/${run}/info`)).data);
  if (infos.some((info) => info === null)) return null;
  const lines = compared(infos);
  const whatever = query["settings"] === "all";
  const shown = lines.filter(({ same }) => whatever || !same);
  const same = lines.filter((line) => line.same).length;
  const names = wanted.map((run) => all.find((one) => one.run === run)?.name ?? run);
  const table = (): unknown[][] => [["setting", ...names], ...shown.map(({ name, values }) => [name, ...values])];
  return (
    <Card title={t("settingsDiffer")} class="differing" actions={<SaveTable name={t("settingsDiffer")} rows={table} />}>
      <table class="plain">
        <thead>
          <tr>
            <th>{t("setting")}</th>
            {wanted.map((run, i) => (
              <th key={run}>
                <Link to={{ view: "settings", query: { run } }}>
                  <bdi>{names[i]}</bdi>
                </Link>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {shown.map(({ name, values, same }) => (
            <tr key={name} class={same ? "muted" : ""}>
              <td>
                <code>{name}</code>
              </td>
              {values.map((value, i) => (
                <td key={i}>{value === null ? "–" : <bdi>{value}</bdi>}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {same > 0 && (
        <p class="muted">
          {t("settingsSame", { count: whole(same) })}{" "}
          <label>
            <input
              type="checkbox"
              checked={whatever}
              onChange={() => patchRoute({ settings: whatever ? undefined : "all" }, true)}
            />
            {t("allSettings")}
          </label>
        </p>
      )}
    </Card>
  );
}
