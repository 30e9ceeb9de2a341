"""Options from papers, imported only when a run asks for them."""
