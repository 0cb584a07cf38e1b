"""Text environments: where the tasks come from and what an answer is worth.

They share :mod:`headrace_environments.text`: one prompt, one generation, one decoded answer, one reward.
Text exists only here, at the edge; everything beyond an environment deals in token ids.
"""
