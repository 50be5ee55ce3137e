"""`blockdraft push`."""

from dataclasses import dataclass

from ..training_settings import setting


@dataclass
class PushArguments:
    """A saved draft and its repository."""

    directory: str = setting("The saved draft: the run's output_dir, or one of its checkpoints.")
    repo_id: str = setting("Repository on the Hub, owner/name; created if it does not exist.")
    private: bool = setting("Create a private repository; a public one that exists is refused.", default=False)
    revision: str | None = setting("Branch (the default one); created if it does not exist.", default=None)
    create_pr: bool = setting("Open a pull request instead.", default=False)
    commit_message: str | None = setting("Title of the commit.", default=None)


SETTINGS = {"Upload": PushArguments}
POSITIONALS = ("directory", "repo_id")


def run(args: PushArguments) -> None:
    """Uploads a saved draft to the Hub: config, weights, code, card, tokenizer, metrics and plots, nothing else."""
    from ...hub_cards.upload import publish

    commit = publish(
        args.directory,
        args.repo_id,
        private=args.private or None,
        revision=args.revision,
        create_pr=args.create_pr,
        commit_message=args.commit_message,
    )
    print(f"Published: {commit.pr_url or commit.commit_url}")
