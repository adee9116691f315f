"""How far are the speeds that mode=plan predicts for cards from published ones?"""
