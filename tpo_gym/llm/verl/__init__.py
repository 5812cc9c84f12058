"""Target Policy Optimization on verl, as a plug-in: a policy loss ``tpo`` and a trainer ``tpo_sync``.

verl loads :mod:`tpo_gym.llm.verl.plugin` by itself in every process, through the entry point ``verl.plugins`` of this
package. Needs the extra ``verl``, in an environment of its own; see ``docs/language-models.md``.
"""
