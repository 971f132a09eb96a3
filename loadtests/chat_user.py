"""Chat users: conversations that grow turn by turn, so that each prompt begins with the one before and its answer."""

from locust import task

from loadtests.model_user import ModelUser, text

SYSTEM_WORDS = 60
QUESTION_WORDS = (8, 40)  # from, to
TURNS = (3, 8)


class ChatUser(ModelUser):
    """Talks for a few turns, then begins anew."""

    kind = "chat"
    weight = 1

    @task
    def converse(self) -> None:
        messages = [{"role": "system", "content": text(f"persona {self.application()}", SYSTEM_WORDS)}]
        for turn in range(self.rng.randint(*TURNS)):
            if turn:
                self.wait()
            messages.append({"role": "user", "content": self.question(self.rng.randint(*QUESTION_WORDS))})
            if (answer := self.ask(messages)) is None:
                return
            messages.append({"role": "assistant", "content": answer.text})
