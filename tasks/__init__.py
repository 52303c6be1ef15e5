"""Where the stages of a recipe run: cached, verified, in processes of their own, watched and recorded."""
