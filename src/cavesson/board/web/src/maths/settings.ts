/** What run.json records of a run, as lines that can be read, searched and compared. */

export interface Setting {
  /** as a recipe names it: optimizer.learning_rate, rewards[0].weight */
  name: string;
  value: string;
}

export interface SettingGroup {
  /** the first part of its settings' names; "" = what is recorded beside the settings */
  name: string;
  settings: Setting[];
}

/** Where the settings are in run.json; versions, the model and more stand beside them. */
const CONFIG = "config";

/** Settings first, by the groups that a recipe has, then what else is recorded. */
export function groupsOf(info: unknown): SettingGroup[] {
  const [config, others] = parts(info);
  return [...grouped(config), ...grouped(others)];
}

function parts(info: unknown): [config: unknown, others: unknown] {
  const { [CONFIG]: config, ...others } = isTable(info) ? info : {};
  return [config, others];
}

function grouped(table: unknown): SettingGroup[] {
  const groups = new Map<string, Setting[]>([["", []]]);
  for (const [name, value] of isTable(table) ? Object.entries(table) : []) {
    const nested = isTable(value) || (Array.isArray(value) && value.some(isTable));
    const key = nested ? name : "";
    groups.set(key, [...(groups.get(key) ?? []), ...flat(name, value)]);
  }
  return [...groups].filter(([, settings]) => settings.length > 0).map(([name, settings]) => ({ name, settings }));
}

function flat(name: string, value: unknown): Setting[] {
  if (isTable(value) && Object.keys(value).length > 0)
    return Object.entries(value).flatMap(([key, inner]) => flat(`${name}.${key}`, inner));
  if (Array.isArray(value) && value.some(isTable)) return value.flatMap((inner, i) => flat(`${name}[${i}]`, inner));
  return [{ name, value: typeof value === "string" ? value : JSON.stringify(value) }];
}

/** The settings in whose name or value a text occurs, in any case. */
export function found(groups: SettingGroup[], text: string): SettingGroup[] {
  const wanted = text.trim().toLowerCase();
  const has = ({ name, value }: Setting): boolean => `${name} ${value}`.toLowerCase().includes(wanted);
  return groups
    .map(({ name, settings }) => ({ name, settings: settings.filter(has) }))
    .filter(({ settings }) => settings.length > 0);
}

export interface Compared {
  name: string;
  /** by run; null = not recorded there */
  values: (string | null)[];
  same: boolean;
}

/**
 * Every setting of any run with its value in each, in the order of the first run that has it. What is recorded beside
 * the settings and called like one of them says so: the steps of a run are not those that its recipe asked for.
 */
export function compared(infos: unknown[]): Compared[] {
  const found = infos.map((info) => parts(info).map((part) => grouped(part).flatMap(({ settings }) => settings)));
  const known = new Set(found.flatMap(([config]) => config!.map(({ name }) => name)));
  const beside = ({ name, value }: Setting): Setting => ({
    name: known.has(name) ? `${name} (run.json)` : name,
    value,
  });
  const tables = found.map(([config, others]) => new Map([...config!, ...others!.map(beside)].map(pair)));
  const names = [...new Set(tables.flatMap((table) => [...table.keys()]))];
  return names.map((name) => {
    const values = tables.map((table) => table.get(name) ?? null);
    return { name, values, same: values.every((value) => value === values[0]) };
  });
}

const pair = ({ name, value }: Setting): [string, string] => [name, value];

function isTable(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
