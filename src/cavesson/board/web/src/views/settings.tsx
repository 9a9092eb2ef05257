/** What a run was started with: its settings by group, versions and the model, as run.json has them. */

import { address } from "../api/client";
import { useResource } from "../api/resource";
import { useText } from "../i18n";
import { found, groupsOf, type SettingGroup } from "../maths/settings";
import { Card } from "../parts/card";
import { Problem } from "../parts/failure";
import { Field } from "../parts/field";
import { SaveTable } from "../parts/save-table";
import { useRun, useVersion } from "../state/board";
import { useRoute } from "../state/router";

export function Settings() {
  const t = useText();
  const run = useRun();
  const { query } = useRoute();
  const { data, error } = useResource<unknown>(address(`runs/${run.run}/info`), useVersion(run.run));
  const all = data === null ? [] : groupsOf(data);
  const groups = found(all, query["setting"] ?? "");
  const rows = (): unknown[][] => [
    ["setting", "value"],
    ...groups.flatMap(({ settings }) => settings.map(({ name, value }) => [name, value])),
  ];
  return (
    <main class="view">
      <div class="bar">
        <Field name="setting" hint={t("findSetting")} class="search" />
        <span class="space" />
        <SaveTable name={t("settings")} rows={rows} />
      </div>
      <Problem text={error} />
      {data !== null && groups.length === 0 && (
        <p class="empty">{t(all.length === 0 ? "noSettings" : "noSettingFound")}</p>
      )}
      <div class="settings">
        {groups.map((group, i) => (
          <Group key={`${group.name} ${i}`} group={group} />
        ))}
      </div>
    </main>
  );
}

function Group({ group: { name, settings } }: { group: SettingGroup }) {
  const t = useText();
  return (
    <Card title={name === "" ? t("general") : name} level={2}>
      <table class="plain">
        <tbody>
          {settings.map((one) => (
            <tr key={one.name}>
              <th scope="row">
                <code>{one.name}</code>
              </th>
              <td>
                <bdi>{one.value}</bdi>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Card>
  );
}
