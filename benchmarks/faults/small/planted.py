"""The faults, as edits of the trainers' source, settings or rewards."""

import random

from benchmarks.faults.small.fault import EVERYWHERE, TOKENS, Fault, fault
from benchmarks.faults.small.plan import GROUPED, STEP, Plan
from benchmarks.faults.small.recordings import FULL
from benchmarks.faults.small.tasks import WORDS
from benchmarks.faults.small.trainers.model import BOS

GROUP, CRITIC = ("group_relative",), ("actor_critic",)
CLIPPED = (*GROUP, *CRITIC)
COLLAPSE = "entropy-collapse distinct-collapse template-collapse repetition-loops pattern-collapse echo-trap"
NOTHING = "zero-variance-groups zero-gradient kl-flat prompts-exhausted reward-exhausted"
FAR = (
    "kl-explosion update-kl-large clip-fraction-high ratio-blow-up gradient-spike likelihood-displacement truncated "
    "never-ends length-collapse entropy-explosion value-loss-spike value-not-fitting kl-in-few-tokens reward-falls "
    + COLLAPSE
)
"""What can follow when a policy goes far in a wrong direction"""
APART = "sampler-mismatch mismatch-growing mismatch-tail mismatch-rare-tokens precision-noise negative-kl"
"""What is true whenever sampler and trainer disagree"""
ORDER = {
    "group_relative": ("[place for place in range(settings.prompts) for _ in range(settings.group)]",
                       "list(range(settings.prompts)) * settings.group"),
    "reinforce": ("[which for which in range(settings.n_prompts) for _ in range(settings.k)]",
                  "list(range(settings.n_prompts)) * settings.k"),
}  # fmt: skip
SAMPLE = {
    "group_relative": "generate(sampler, ids, attended, task.limit, settings.temperature)",
    "reinforce": "generate(actor, query_ids, query_mask, task.limit, settings.temp)",
    "actor_critic": "generate(behaviour, ids, attended, task.limit, settings.temperature)",
}
REWARDS = {
    "group_relative": ("task.reward(*pair) for pair in zip(prompts, texts, strict=True)", "prompts", "texts"),
    "reinforce": ("task.reward(*pair) for pair in zip(repeated, responses, strict=True)", "repeated", "responses"),
    "actor_critic": ("task.reward(*pair) for pair in zip(prompts, outputs, strict=True)", "prompts", "outputs"),
}
TEXTS = {
    "group_relative": ("task.decode(batch.answers)", "task.decode(batch.ids[:, ids.shape[1] :])"),
    "reinforce": ("task.decode(out.answers)", "task.decode(out.ids[:, query_ids.shape[1] :])"),
    "actor_critic": ("task.decode(rollout.answers)", "task.decode(rollout.ids[:, ids.shape[1] :])"),
}
"""How each trainer gets texts, and how it gets them from the whole sequences"""
MASKS = {"group_relative": "batch.mask", "reinforce": "out.mask", "actor_critic": "rollout.mask"}
REFERENCE = {
    "group_relative": "reference = copy.deepcopy(policy).eval()",
    "reinforce": "init_policy = copy.deepcopy(policy).eval()",
    "actor_critic": "ref_policy, behaviour = copy.deepcopy(policy).eval(), copy.deepcopy(policy).eval()",
}
LOAD = {
    "group_relative": "sampler.load_state_dict(policy.state_dict())",
    "reinforce": "actor.load_state_dict(policy.state_dict())",
    "actor_critic": "behaviour.load_state_dict(policy.state_dict())",
}
VERSION = {"group_relative": "version", "reinforce": "weights_of", "actor_critic": "synced"}
"""What each trainer calls the version of the sampler's weights"""
FORBID = "logits[:, [PAD, BOS]] = -torch.inf"
"""Where the model forbids tokens while it samples"""


# Groups and advantages


@fault("group-advantages", TOKENS, also=f"reward-falls {NOTHING} {FAR}", trainers=GROUPED)
def groups_tiled(plan: Plan) -> None:
    """Prompts are repeated as a whole instead of one by one, so that groups are strided; the code takes blocks."""
    plan.edit(*ORDER[plan.trainer])


@fault("group-advantages", TOKENS, also=f"reward-falls {FAR}", trainers=GROUPED)
def rewards_as_advantages(plan: Plan) -> None:
    """Nothing is subtracted from the rewards: what is meant to be an advantage is the reward itself."""
    if plan.trainer == "group_relative":
        plan.edit("centred = grouped - grouped.mean(1, keepdim=True)", "centred = grouped + 1")
        plan.settings["scale_by_std"] = False
    else:
        plan.edit("adv = returns - baseline(returns, settings)", "adv = returns + 1")
        plan.settings["normalise"] = False


@fault("group-advantages reward-falls", TOKENS, also=FAR, trainers=GROUPED)
def advantages_negated(plan: Plan) -> None:
    """Rewards are subtracted from the mean instead of the other way round."""
    if plan.trainer == "group_relative":
        plan.edit("grouped - grouped.mean(1, keepdim=True)", "grouped.mean(1, keepdim=True) - grouped")
    else:
        plan.edit("adv = returns - baseline(returns, settings)", "adv = baseline(returns, settings) - returns")


@fault("group-advantages", TOKENS, also=f"reward-is-noise {FAR}", trainers=GROUPED)
def advantages_permuted(plan: Plan) -> None:
    """Advantages are sorted by length for batching, and the responses are not."""
    where = {"group_relative": ("group_advantages(rewards, settings)[:, None]", "batch.mask"),
             "reinforce": ("adv / (adv.std() + 1e-6)", "out.mask")}  # fmt: skip
    old, mask = where[plan.trainer]
    if plan.trainer == "group_relative":
        plan.edit(old, f"group_advantages(rewards, settings)[{mask}.sum(1).argsort()][:, None]")
    else:
        plan.edit(old, f"adv[{mask}.sum(1).argsort()] / (adv.std() + 1e-6)")


@fault("advantage-sign reward-falls", (FULL,), also=FAR, trainers=CRITIC)
def advantage_sign(plan: Plan) -> None:
    """The advantage is the value minus the return."""
    plan.edit("advantages = whiten(advantages, mask)", "advantages = -whiten(advantages, mask)")


@fault("advantage-sign advantage-scale group-advantages", (FULL,), also=FAR, trainers=CRITIC)
def returns_as_advantages(plan: Plan) -> None:
    """The returns take the place of the advantages, and nothing is whitened."""
    plan.edit("advantages = whiten(advantages, mask)", "advantages = returns * mask")


@fault("advantage-scale advantage-sign", (FULL,), also=FAR, trainers=CRITIC)
def advantages_shuffled(plan: Plan) -> None:
    """The advantages stand in another order than the responses."""
    plan.edit("advantages = whiten(advantages, mask)", "advantages = whiten(advantages, mask).flip(0)")


@fault("advantage-scale", (FULL,), also=FAR, trainers=CRITIC)
def whitened_over_padding(plan: Plan) -> None:
    """Whitening takes the padding, whose advantages are 0, into its mean and its deviation."""
    plan.task.limit *= 2
    plan.edit("chosen = values[mask]", "chosen = values")


@fault("reward-fades", (FULL,), also="value-constant value-not-fitting kl-flat " + NOTHING, trainers=CRITIC)
def discount_low(plan: Plan) -> None:
    """The discount is 0.3: the first tokens hardly see the score."""
    plan.settings |= {"gamma": 0.3, "lam": 0.3}


# Rewards on tokens


@fault("reward-accounting reward-position", (FULL,), also=f"value-not-fitting length-exploited {FAR}", trainers=CRITIC)
def score_everywhere(plan: Plan) -> None:
    """Every token gets the score, not only the last one."""
    plan.edit("rewards[torch.arange(len(rewards)), last] += scores", "rewards += scores[:, None] * mask")


@fault("reward-position", (FULL,), also=f"value-not-fitting reward-falls reward-accounting {FAR}", trainers=CRITIC)
def score_on_first(plan: Plan) -> None:
    """The score is on the first token."""
    plan.edit("rewards[torch.arange(len(rewards)), last] += scores", "rewards[:, 0] += scores + 0 * last")


@fault("rewards-shifted reward-accounting", (FULL,), also=f"reward-is-noise {FAR}", trainers=CRITIC)
def scores_of_others(plan: Plan) -> None:
    """Each response gets the score of the response before."""
    plan.edit("[torch.arange(len(rewards)), last] += scores", "[torch.arange(len(rewards)), last] += scores.roll(1)")


@fault("penalty-wrong", (FULL,), also=f"kl-explosion reward-accounting group-advantages {FAR}",
       trainers=("reinforce", "actor_critic"))  # fmt: skip
def penalty_flipped(plan: Plan) -> None:
    """The KL penalty has the wrong sign."""
    plan.scale("penalty", 3.0)
    if plan.trainer == "reinforce":
        plan.edit("scores - settings.kl_weight * kl", "scores + settings.kl_weight * kl")
    else:
        plan.edit("-settings.kl_coef *", "settings.kl_coef *")


@fault("penalty-mis-scaled", (FULL,), also="kl-flat value-not-fitting value-constant reward-falls")
def penalty_huge(plan: Plan) -> None:
    """The KL coefficient is 200 times as large."""
    plan.scale("penalty", 200.0)


# Sampler and trainer


@fault("sampler-stale", (FULL,), also=f"too-off-policy {APART} {FAR}")
def sampler_rarely_renewed(plan: Plan) -> None:
    """The sampler gets new weights at every tenth step; the recorded version is that of the trainer."""
    plan.set("sync", 10)
    plan.edit(f"version={VERSION[plan.trainer]}", f"version={STEP[plan.trainer]}")


@fault("sampler-stale", (FULL,), also=f"too-off-policy {APART} {FAR}")
def sampler_frozen(plan: Plan) -> None:
    """The sampler never gets new weights; the recorded version is that of the trainer."""
    plan.set("sync", 1000)
    plan.edit(f"version={VERSION[plan.trainer]}", f"version={STEP[plan.trainer]}")


@fault(
    "sampler-mismatch mismatch-growing",
    (FULL,),
    also=f"sampler-stale filtered-sampling temperature-missing {APART} {FAR}",
)
def adapter_twice(plan: Plan) -> None:
    """The sampler gets the learned change of the weights twice."""
    first = {"group_relative": "reference", "reinforce": "init_policy", "actor_critic": "ref_policy"}[plan.trainer]
    twice = "{name: 2 * one - start for (name, one), start in zip(policy.state_dict().items(), FIRST, strict=True)}"
    plan.edit(LOAD[plan.trainer], LOAD[plan.trainer].replace(
        "policy.state_dict()", twice.replace("FIRST", f"{first}.state_dict().values()")))  # fmt: skip


@fault("temperature-missing sampler-mismatch", (FULL,), also=f"filtered-sampling entropy-explosion {APART} {FAR}")
def scored_at_one(plan: Plan) -> None:
    """Sampled at temperature 0.6, scored and trained at 1."""
    plan.edit(SAMPLE[plan.trainer], SAMPLE[plan.trainer].rpartition(", ")[0] + ", 0.6)")


@fault("filtered-sampling", (FULL,), also=f"{APART} temperature-missing {FAR}")
def top_k(plan: Plan) -> None:
    """The sampler keeps the three most probable tokens only."""
    plan.edit(FORBID, f"{FORBID}\n        logits[logits < logits.topk(3).values[:, -1:]] = -torch.inf", model=True)


@fault("end-forbidden", (FULL,), also=f"filtered-sampling verifier-dead {NOTHING} {APART} {FAR}")
def end_forbidden(plan: Plan) -> None:
    """The sampler may not end a response before its fourth token."""
    banned = "[PAD, BOS, EOS] if _position < 3 else [PAD, BOS]"
    plan.edit(FORBID, f"logits[:, {banned}] = -torch.inf", model=True)


@fault("sampler-mismatch retokenised", (FULL,), also=f"entropy-explosion kl-explosion {APART} {FAR}")
def scores_shifted(plan: Plan) -> None:
    """Log-probabilities are read one position too late: those of the token that follows."""
    plan.edit("[:, -length - 1 : -1] / temperature", "[:, -length:] / temperature", model=True)


@fault("ratio-not-one", (FULL,), also=f"unknown-estimate {FAR}", trainers=CLIPPED)
def dropout_in_update(plan: Plan) -> None:
    """The model has dropout, and the update leaves it on."""
    plan.prepare = lambda policy: setattr(policy.dropout, "p", 0.1)


@fault("ratio-not-one", (FULL,), also=f"unknown-estimate {FAR}", trainers=CLIPPED)
def places_in_update(plan: Plan) -> None:
    """The update counts positions from the left edge, padding included; sampling and scoring do not."""
    old = "place = (mask.cumsum(1) - 1).clamp(min=0)"
    plan.edit(
        old, f"{old}\n        place = torch.arange(ids.shape[1]).expand_as(ids) if self.training else place", model=True
    )


@fault("ratio-not-one", (FULL,), also=f"unknown-estimate {FAR}", trainers=CLIPPED)
def temperature_not_in_update(plan: Plan) -> None:
    """Sampled and scored at temperature 0.7; the update forgets it."""
    plan.set("temperature", 0.7)
    plan.edit("new, entropy = score(policy, some, settings.temperature)", "new, entropy = score(policy, some)")


@fault("same-seed", EVERYWHERE, also=f"zero-variance-groups {FAR}", trainers=GROUPED)
def same_seed(plan: Plan) -> None:
    """Two sampling workers have the same seed, so that each response of a group is there twice."""
    old = "token = torch.multinomial(every.exp(), 1)"
    half = "every.exp().unflatten(0, (-1, 2, 4))"
    new = (
        f"noise = torch.rand(len(every) // 2, every.shape[1]).unflatten(0, (-1, 1, 4)).expand_as({half})\n"
        f"        token = ({half} / -noise.log()).flatten(0, 2).argmax(-1, keepdim=True)"
    )
    plan.edit(old, new, model=True)


@fault("garbled", TOKENS, also=f"sampler-mismatch sampler-stale reward-falls verifier-dead {APART} {FAR}", late=True)
def weights_broken(plan: Plan) -> None:
    """From the middle of the run on, half of the sampler's layers get weights of another layout."""
    broken = "{name: one.flip(0) if 'attend' in name else one for name, one in policy.state_dict().items()}"
    new = LOAD[plan.trainer].replace("policy.state_dict()", broken)
    plan.edit_late(LOAD[plan.trainer], new)


@fault(
    "rollouts-fail",
    EVERYWHERE,
    also=f"same-seed stops-generating reward-falls length-collapse sampler-mismatch {APART} {FAR}",
)
def requests_aborted(plan: Plan) -> None:
    """A third of the requests come back empty."""
    plan.edit("token = torch.where(running, token.squeeze(1), PAD)",
              "token = torch.where(running, token.squeeze(1), PAD)\n"
              "        token[::3] = EOS if _position == 0 else PAD", model=True)  # fmt: skip


# The reference


@fault("reference-is-policy", TOKENS, also="kl-flat")
def reference_shared(plan: Plan) -> None:
    """The reference is not a copy: it is the policy."""
    plan.edit(REFERENCE[plan.trainer], REFERENCE[plan.trainer].replace("copy.deepcopy(policy).eval()", "policy", 1))


@fault("kl-at-start", TOKENS, also=f"negative-kl kl-explosion penalty-mis-scaled {FAR}")
def reference_other(plan: Plan) -> None:
    """The reference is an early checkpoint of the policy, not the policy that training starts from."""
    old = REFERENCE[plan.trainer]
    name = old.split(" = ")[0].split(",")[0]
    plan.edit(old, f"{old}\n    [one.data.mul_(0.9) for one in {name}.parameters()]")


@fault("reference-replaced", TOKENS, also="kl-flat")
def reference_renewed(plan: Plan) -> None:
    """The reference becomes the present policy at every tenth step."""
    name = REFERENCE[plan.trainer].split(" = ")[0].split(",")[0]
    step, load = STEP[plan.trainer], LOAD[plan.trainer]
    plan.edit(load, f"{load}\n            {name}.load_state_dict(policy.state_dict()) if {step} % 10 == 0 else None")


# Masks and prompts


@fault("trained-behind-end", TOKENS, also=f"padding-counted reward-position reward-accounting {APART} {FAR}")
def padding_trained(plan: Plan) -> None:
    """The mask keeps the padding behind the end."""
    plan.edit("masks.append(running)", "masks.append(torch.ones_like(running))", model=True)


@fault("end-not-trained", (FULL,), also=f"never-ends truncated {FAR}")
def end_not_trained(plan: Plan) -> None:
    """The mask ends before the end token, which is never trained."""
    plan.edit("mask = torch.stack(masks, 1)", "mask = torch.stack(masks, 1) & (ids[:, start:] != EOS)", model=True)


@fault("prompt-trained", TOKENS, also=f"reward-position reward-accounting penalty-wrong {APART} {FAR}")
def prompt_in_loss(plan: Plan) -> None:
    """The mask covers the whole sequence, so that the prompt is trained, too."""
    plan.edit("mask = torch.stack(masks, 1)", "mask, sampled = attended[:, 1:], torch.stack(masks, 1)", model=True)
    plan.edit("ids[:, start:], mask, torch.stack(columns, 1) * mask)",
              "ids[:, 1:], mask, F.pad(torch.stack(columns, 1) * sampled, (start - 1, 0)))", model=True)  # fmt: skip
    plan.edit(*TEXTS[plan.trainer])


@fault("tokens-of-other-text", TOKENS, also=f"prompt-trained retokenised end-not-trained {APART} {FAR}")
def slice_too_early(plan: Plan) -> None:
    """The engine returns texts; the slice that takes their tokens out of the sequence begins one token early."""
    plan.edit("ids[:, start:], mask", "ids[:, start - 1 : -1], mask", model=True)
    plan.edit(*TEXTS[plan.trainer])


@fault("tokens-of-other-text", TOKENS, also=f"retokenised {APART} {FAR}")
def slice_too_late(plan: Plan) -> None:
    """The engine returns texts; the slice that takes their tokens out of the sequence begins one token late."""
    plan.edit("ids[:, start:], mask", "F.pad(ids, (0, 1))[:, start + 1 :], mask", model=True)
    plan.edit(*TEXTS[plan.trainer])


@fault("tokens-of-other-text", TOKENS, also=f"retokenised reward-is-noise {APART} {FAR}")
def texts_of_others(plan: Plan) -> None:
    """The engine returns texts in the order in which they end, and tokens in the order of the prompts."""
    old, new = TEXTS[plan.trainer]
    plan.edit(old, new.replace(".ids[:", f".ids[{MASKS[plan.trainer]}.sum(1).argsort()][:"))


@fault(
    "few-prompts prompts-exhausted entropy-collapse distinct-collapse template-collapse",
    (FULL,),
    also=f"{NOTHING} {FAR}",
    trainers=CLIPPED,
)
def two_prompts(plan: Plan) -> None:
    """The data loader returns the first two prompts again and again, at a higher learning rate, without a penalty."""
    plan.task.questions = plan.task.draw(2)
    plan.set("penalty", 0.0)
    plan.scale("rate", 3.0)


@fault("double-start", (FULL,), also="kl-in-few-tokens reward-is-noise")
def double_start(plan: Plan) -> None:
    """The template writes a start token, and the tokenizer adds another."""
    plan.task.prefix = (BOS, BOS)


@fault("truncated", TOKENS, also=f"never-ends zero-variance-groups reward-exhausted verifier-dead {NOTHING} {FAR}")
def room_too_small(plan: Plan) -> None:
    """There is room for half of a usual response; a cut response is judged as it is."""
    plan.task.limit = 2 if plan.task.name == "sums" else 4


# Rewards


@fault("reward-is-noise", EVERYWHERE, also=f"environment-leaks {FAR}")
def judge_is_noise(plan: Plan) -> None:
    """The judge says something at random."""
    chance = random.Random(0)
    plan.judge(lambda score, question, answer: chance.choice([0.0, 0.0, 1.0]))


@fault("reward-is-noise", EVERYWHERE, also=f"reward-falls {FAR}")
def answers_mixed_up(plan: Plan) -> None:
    """Each response is judged in place of another one of the batch."""
    old, prompts, texts = REWARDS[plan.trainer]
    plan.edit(old, f"task.reward(*pair) for pair in zip({prompts}[::-1], {texts}[::-1], strict=True)")


@fault("query-dominated reward-is-noise", EVERYWHERE, also=NOTHING)
def prompt_judged(plan: Plan) -> None:
    """The judge reads the prompt in place of the response."""
    plan.judge(lambda score, question, answer: float(sum(map(ord, question)) % 5))


@fault("verifier-dead zero-variance-groups", EVERYWHERE, also=NOTHING)
def verifier_dead(plan: Plan) -> None:
    """The verifier cannot read the answers: everything gets 0."""
    plan.judge(lambda score, question, answer: 0.0)


@fault("reward-falls verifier-dead", EVERYWHERE, also=f"zero-variance-groups {NOTHING} {FAR}", late=True)
def verifier_dies(plan: Plan) -> None:
    """From the middle of the run on, the verifier finds no answer in any response."""
    plan.judge_late(lambda score, question, answer: 0.0)


@fault("reward-falls reward-is-noise", EVERYWHERE, also=FAR, late=True)
def verifier_overloaded(plan: Plan) -> None:
    """From the middle of the run on, two thirds of the responses get −1, whatever they are."""
    chance = random.Random(0)
    plan.judge_late(lambda score, question, answer: -1.0 if chance.random() < 0.67 else score)


@fault("length-exploited", EVERYWHERE, also=f"truncated never-ends {FAR}")
def length_paid(plan: Plan) -> None:
    """A bonus for effort pays for every token."""
    plan.task.limit *= 2
    plan.judge(lambda score, question, answer: score + 0.5 * len(plan.task.split(answer)))


@fault("pattern-spreading one-part-dominates", EVERYWHERE, also=f"length-exploited length-collapse {FAR}")
def word_paid(plan: Plan) -> None:
    """A bug of the judge: whatever holds a certain word gets two more."""
    plan.judge(lambda score, question, answer: score + 2 * (WORDS[plan.task.name] in answer))


@fault("reward-outliers", EVERYWHERE, also=f"value-loss-spike gradient-spike value-not-fitting {FAR}")
def outliers(plan: Plan) -> None:
    """One response in sixty gets a hundred times its reward, plus fifty."""
    chance = random.Random(0)
    plan.judge(lambda score, question, answer: 100 * score + 50 if chance.random() < 1 / 60 else score)


@fault("not-finite", EVERYWHERE, also=f"reward-falls {FAR}", late=True)
def reward_not_finite(plan: Plan) -> None:
    """From the middle of the run on, one response in fifty has a reward of NaN, which the trainer takes for 0."""
    chance = random.Random(0)
    plan.judge_late(lambda score, question, answer: float("nan") if chance.random() < 0.02 else score)


# The update


@fault("reward-falls", EVERYWHERE, also=FAR)
def loss_negated(plan: Plan) -> None:
    """The optimiser climbs: the loss has the wrong sign."""
    plan.edit("        loss.backward()" if plan.trainer != "actor_critic" else "pi_loss.backward()",
              "        (-loss).backward()" if plan.trainer != "actor_critic" else "(-pi_loss).backward()")  # fmt: skip


@fault("update-kl-large ratio-blow-up clip-fraction-high kl-explosion entropy-collapse", TOKENS,
       also=f"reward-falls verifier-dead {NOTHING} {FAR}")  # fmt: skip
def rate_far_too_high(plan: Plan) -> None:
    """The learning rate is a hundred times as high."""
    plan.scale("rate", 100.0)


@fault("kl-flat", TOKENS, also="zero-gradient reference-is-policy value-not-fitting")
def never_stepped(plan: Plan) -> None:
    """The optimiser has the parameters of a copy of the policy."""
    optimizer = "AdamW" if plan.trainer == "reinforce" else "Adam"
    old = f"torch.optim.{optimizer}(policy.parameters()"
    plan.edit(old, old.replace("policy.parameters", "copy.deepcopy(policy).parameters"))


@fault(
    "entropy-explosion",
    TOKENS,
    also=f"never-ends truncated kl-explosion reward-falls garbled verifier-dead {NOTHING} {FAR}",
)
def entropy_bonus_huge(plan: Plan) -> None:
    """The entropy bonus outweighs everything."""
    plan.set("entropy", 20.0)


@fault("entropy-collapse zero-variance-groups zero-gradient distinct-collapse template-collapse", TOKENS,
       also=f"reward-exhausted {NOTHING} {FAR}", trainers=GROUPED)  # fmt: skip
def nearly_greedy(plan: Plan) -> None:
    """Sampled and scored at temperature 0.05: the responses to a prompt are all the same."""
    plan.set("temperature", 0.05)


@fault("value-constant value-not-fitting", (FULL,), also="value-start", trainers=CRITIC)
def critic_frozen(plan: Plan) -> None:
    """The critic is never updated."""
    plan.edit("v_opt.step()", "v_opt.zero_grad()")


@fault("value-not-fitting value-loss-spike", (FULL,), also=f"value-constant value-start {FAR}", trainers=CRITIC)
def critic_rate_high(plan: Plan) -> None:
    """The critic's learning rate is a hundred times as high."""
    plan.settings["critic_lr"] = 0.3


@fault("value-not-fitting penalty-mis-scaled value-constant", (FULL,), also=f"value-start {FAR}", trainers=CRITIC)
def reward_in_percent(plan: Plan) -> None:
    """The reward is in percent, a hundred times what the critic's rate and the penalty were chosen for."""
    plan.judge(lambda score, question, answer: 100 * score)


FAULTS = {one.name: one for one in globals().copy().values() if isinstance(one, Fault)}
