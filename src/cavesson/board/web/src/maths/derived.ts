// Written by derived.py from cavesson/record/derived.py.

const { exp, expm1 } = Math;

/** Token columns that follow from recorded ones: what they need, in the order of the arguments of `of`. */
export const DERIVED = {
  kl_k1: {
    needs: ["logprob", "ref_logprob"],
    doc: "k1 estimate of the KL: Δ = logprob − ref_logprob, in nats",
    of: (logprob: number, ref_logprob: number) => logprob - ref_logprob,
  },
  kl_k3: {
    needs: ["logprob", "ref_logprob"],
    doc: "k3 estimate of the KL: e^(−Δ) − 1 + Δ, in nats, never negative",
    of: (logprob: number, ref_logprob: number) => expm1(ref_logprob - logprob) + (logprob - ref_logprob),
  },
  teacher_kl: {
    needs: ["logprob", "teacher_logprob"],
    doc: "k1 estimate of the reverse KL to the teacher: logprob − teacher_logprob, in nats",
    of: (logprob: number, teacher_logprob: number) => logprob - teacher_logprob,
  },
  prob: {
    needs: ["logprob"],
    doc: "probability under the policy before the update",
    of: (logprob: number) => exp(logprob),
  },
  ref_prob: {
    needs: ["ref_logprob"],
    doc: "probability under the reference policy",
    of: (ref_logprob: number) => exp(ref_logprob),
  },
  sampler_gap: {
    needs: ["logprob", "sampler_logprob"],
    doc: "logprob − sampler_logprob, in nats",
    of: (logprob: number, sampler_logprob: number) => logprob - sampler_logprob,
  },
} as const;
