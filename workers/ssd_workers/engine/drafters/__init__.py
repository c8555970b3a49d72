"""Where drafts come from. Each drafter guesses; none can change the text, only its speed."""
