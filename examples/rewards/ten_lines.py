"""A reward of one's own: answers that fall, zyx rather than xyz. Named in job.toml; nothing is installed."""


def reward(prompt: str, answer: str) -> float:
    """1 when the answer falls from its start for as many steps as the prompt's symbols allow, less for fewer."""
    falls = 0
    while falls + 1 < len(answer) and answer[falls + 1] < answer[falls]:
        falls += 1
    return min(falls / (len(prompt) - 2), 1.0) if answer.isalnum() else 0.0
