"""The learner of agl: GRPO on Accelerate over transitions of any agent, with an embedded engine."""
